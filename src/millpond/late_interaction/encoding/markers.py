"""The tokens of a text for a late-interaction checkpoint: markers, query expansion, and the rows that are scored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import Lowercase

from millpond.checkpoints.layouts.late_interaction import LateInteraction
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError
from millpond.tasks import ROLES, Role, Truncate

_LOWER = Lowercase()
# Gives the ids of those texts that it can split.
Split = Callable[[Sequence[str]], Sequence[npt.NDArray[np.int32] | None]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedText:
    """One query or document."""

    ids: npt.NDArray[np.int32]  # int32 `[tokens]`: special tokens, marker, prompt, text, and a query's expansion
    truncated: bool  # whether the text was cut
    attended: int | None = None  # number of leading tokens that attention may see; `None` is all
    kept: npt.NDArray[np.bool_] | None = None  # bool `[tokens]`: the rows that are scored; `None` is all
    # int32 `[tokens, 2]`: each token's characters, half open, in `prompt` and the text after it, both folded if the
    # checkpoint folds case; `(0, 0)` for special tokens, marker and expansion. `None` unless requested.
    offsets: npt.NDArray[np.int32] | None = None
    prompt: str = ""  # what stands before the text: the part of the marker that is no token, and the prompt


class ColbertEncoder:
    """Tokenizes queries and documents as a late-interaction checkpoint does.

    The marker is inserted as an id after the leading special token, after the text was tokenized: a text that contains
    the marker literally is tokenized as ordinary text.
    """

    def __init__(
        self,
        backend: Tokenizer,
        late: LateInteraction,
        *,
        mask: int | None,
        end: int | None,
        unknown: int | None,
        lower: bool = False,
    ) -> None:
        """Resolve every token that ``late`` names; ModelLoadError if the tokenizer lacks the one that expands queries.

        ``backend`` is the checkpoint's tokenizer; shared, but its padding and truncation are switched off. ``mask``,
        ``end`` and ``unknown`` are ids, ``end`` expands queries where there is no mask; ``lower`` folds case first.
        """
        backend.no_padding()
        backend.no_truncation()
        probe = backend.encode("a").special_tokens_mask
        self._prefix = next((i for i, special in enumerate(probe) if not special), len(probe))
        self._suffix = next((i for i, special in enumerate(reversed(probe)) if not special), 0)
        self._late = late
        self._lower = lower
        named = {"query": late.query_marker, "document": late.document_marker}
        markers = {role: _split(named[role], backend) for role in ROLES}
        # The part of a marker that is not a token of the vocabulary is read as text, before the prompt.
        self._markers = {
            role: np.array([backend.token_to_id(token)] if token else [], dtype=np.int32)
            for role, (token, _) in markers.items()
        }
        self._texts = {role: text for role, (_, text) in markers.items()}
        self._backend = _without(backend, {token for token, _ in markers.values() if token is not None})
        self._split: Split | None = None
        self._skipped = _skipped(late.skiplist, backend, unknown)
        self._fill = mask if mask is not None else end
        if late.expansion_token is not None:
            self._fill = backend.token_to_id(late.expansion_token)
        if late.expand_to is not None and self._fill is None:
            filler = late.expansion_token or "the mask token"
            raise ModelLoadError(f"queries are filled up with {filler}, which this tokenizer does not have")

    def encode(
        self,
        texts: Sequence[str],
        *,
        role: Role,
        prompt: str = "",
        limit: int | None = None,
        truncate: Truncate = "end",
        index_of: Callable[[int], int],
        align: bool = False,
    ) -> list[EncodedText]:
        """Tokenize each text.

        Args:
            texts: The texts.
            role: Queries and documents have their own marker, length and expansion.
            prompt: Text to put after the marker.
            limit: Most tokens of each result; the checkpoint's own length applies if it is smaller.
            truncate: The end at which a text is cut; ``"error"`` raises InputTooLongError.
            index_of: The index of a text in the caller's list, for errors.
            align: Whether the results have the offsets of their tokens.
        """
        own = self._late.query_length if role == "query" else self._late.document_length
        limits = [length for length in (own, limit) if length is not None]
        longest = min(limits) if limits else None
        prompt = self._texts[role] + prompt
        encoded = []
        prompted = [prompt + text for text in texts]
        encodings = self._encode(prompted, offsets=True) if align else []
        arrays = [_ids(encoding) for encoding in encodings] if align else self._arrays(prompted)
        for i, own_ids in enumerate(arrays):
            ids = np.concatenate((own_ids[: self._prefix], self._markers[role], own_ids[self._prefix :]))
            offsets = self._offsets(encodings[i], role) if align else None
            cut = False
            if longest is not None and len(ids) > longest:
                cut = True
                if truncate == "error":
                    raise InputTooLongError(
                        f"the {role} at index {index_of(i)} has {len(ids)} tokens, more than {longest}; "
                        'shorten it, or let it be cut with truncate="end"',
                        index=index_of(i),
                        tokens=len(ids),
                        limit=longest,
                    )
                kept = self._cut(len(ids), prompt + texts[i], prompt, role, longest, truncate)
                ids, offsets = ids[kept], None if offsets is None else offsets[kept]
            if len(ids) == 0:
                ids = self._stand_in(index_of(i))
            finished = self._finish(ids, cut, role, limit)
            if offsets is not None:
                padding = ((0, len(finished.ids) - len(offsets)), (0, 0))
                finished = replace(finished, offsets=np.pad(offsets, padding), prompt=prompt)
            encoded.append(finished)
        return encoded

    def read_by(self, native: Callable[[Tokenizer], Split | None]) -> None:
        """Split texts by what ``native`` makes of the tokenizer, which still reads those that it leaves."""
        self._split = native(self._backend)

    def _arrays(self, texts: list[str]) -> list[npt.NDArray[np.int32]]:
        """int32 ``[tokens]`` of each text, uncut."""
        found = self._split(texts) if self._split is not None else [None] * len(texts)
        rest = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        own = map(_ids, self._encode(rest, offsets=False) if rest else ())
        return [next(own) if ids is None else ids for ids in found]

    def _encode(self, texts: list[str], *, offsets: bool) -> list[Encoding]:
        if self._lower:
            texts = [_LOWER.normalize_str(text) for text in texts]
        # The fast variant leaves the offsets out.
        return self._backend.encode_batch(texts) if offsets else self._backend.encode_batch_fast(texts)

    def _offsets(self, encoding: Encoding, role: Role) -> npt.NDArray[np.int32]:
        """``[tokens, 2]`` of an encoding with the marker."""
        offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)  # (0, 0) of special tokens
        return np.insert(offsets, [min(self._prefix, len(offsets))] * len(self._markers[role]), 0, axis=0)

    def _finish(self, ids: npt.NDArray[np.int32], cut: bool, role: Role, limit: int | None) -> EncodedText:
        """Expand a query, and mark the tokens that are not attended to and the rows that are not scored."""
        real, width = len(ids), self._late.expand_to if role == "query" else None
        if width is not None and limit is not None:
            width = min(width, limit)
        attended = None
        if width is not None and width > real:
            ids = np.concatenate((ids, np.full(width - real, self._fill, dtype=np.int32)))
            attended = None if self._late.attend_to_expansion else real
        kept = None
        if role in self._late.skiplist_roles:
            skipped = np.isin(ids, self._skipped)
            kept = ~skipped if skipped.any() else None
        return EncodedText(ids=ids, truncated=cut, attended=attended, kept=kept)

    def _stand_in(self, index: int) -> npt.NDArray[np.int32]:
        """The ids of a text without tokens: the tokenizer adds no special tokens, and there is no marker."""
        if self._fill is None:
            raise InvalidRequestError(
                f"the text at index {index} has no tokens, and this tokenizer has no special token to stand in; "
                "leave empty texts out"
            )
        return np.array([self._fill], dtype=np.int32)

    def _cut(
        self, length: int, text: str, prompt: str, role: Role, longest: int, truncate: Truncate
    ) -> npt.NDArray[np.int64]:
        """Which of an over-long text's tokens stay, ``longest`` of them: special tokens, marker and prompt do."""
        front = self._prefix + len(self._markers[role]) + self._prompt_tokens(text, prompt)
        end = length - self._suffix
        room = longest - front - self._suffix
        if room < 1:
            raise InputTooLongError(
                f"marker, prompt and special tokens take {front + self._suffix} of a {role}'s {longest} tokens, which "
                "leaves none for the text; shorten the prompt or raise the limit"
            )
        first = front if truncate == "end" else end - room
        return np.concatenate((np.arange(front), np.arange(first, first + room), np.arange(end, length)))

    def _prompt_tokens(self, text: str, prompt: str) -> int:
        """The number of tokens, without special tokens, that begin inside the prompt."""
        if not prompt:
            return 0
        if self._lower:
            text, prompt = _LOWER.normalize_str(text), _LOWER.normalize_str(prompt)
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        return next((i for i, (start, _) in enumerate(offsets) if start >= len(prompt)), len(offsets))


def _ids(encoding: Encoding) -> npt.NDArray[np.int32]:
    return np.array(encoding.ids, dtype=np.int32)


def _split(marker: str, backend: Tokenizer) -> tuple[str | None, str]:
    """A marker as (token, text after it): the token is the whole marker or its first word, if in the vocabulary."""
    for token in (marker, *marker.split(None, 1)[:1]):
        if token and marker.startswith(token) and backend.token_to_id(token) is not None:
            return token, marker.removeprefix(token)
    return None, marker


def _skipped(words: Iterable[str], backend: Tokenizer, unknown: int | None) -> npt.NDArray[np.int32]:
    """Ids of those ``words`` that are tokens; a word that is not must not make unknown tokens skipped."""
    ids = {backend.token_to_id(word) for word in words}
    named = unknown is not None and backend.id_to_token(unknown) in set(words)
    return np.array(sorted(i for i in ids if i is not None and (i != unknown or named)), dtype=np.int32)


def _without(backend: Tokenizer, markers: set[str]) -> Tokenizer:
    """A copy of the tokenizer that does not match ``markers`` in a text; ids stay the same."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    if not markers & added:
        return backend
    content = json.loads(backend.to_str())
    plain = backend.get_vocab(with_added_tokens=False)
    kept = []
    for token in content["added_tokens"]:
        if token["content"] not in markers:
            kept.append(token)
        elif token["content"] not in plain:
            # Its id must stay taken, under a content that no text has: these two are Unicode noncharacters.
            kept.append({**token, "content": f"\ufdd0{token['id']}\ufdd1", "normalized": False})
    content["added_tokens"] = kept
    hidden: Tokenizer = Tokenizer.from_str(json.dumps(content))
    return hidden
