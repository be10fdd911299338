"""Texts to token ids: batched, thread-safe, the interpreter lock released while the tokenizer works."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import BertNormalizer, Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer

from millpond.checkpoints.late_interaction import LateInteraction
from millpond.checkpoints.tokenizer_file import read_as_is
from millpond.engine.input.chat import render_chat
from millpond.engine.input.word_ids import word_numbers
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError
from millpond.late_interaction.encode import ColbertEncoder
from millpond.models.load import quiet_transformers
from millpond.tasks import Truncate

# A tokenizer without a limit of its own says so with an astronomical number.
_NO_LIMIT = 1_000_000
# As sentence-transformers folds case, letter by letter: str.lower() knows the final sigma.
_LOWER = Lowercase()
# Characters read of a text per token that is kept of it, before more are: English has four to five.
_HEAD = 8
# Characters of a single text that is tokenized with the interpreter's lock held: letting it go takes as long.
_QUICK = 4096
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Places:
    """Where a text's tokens come from.

    Attributes:
        offsets: int32 ``[tokens, 2]`` character spans in the caller's text, half open.
        special: bool ``[tokens]`` tokens that stand for no text (a prompt's, too).
        words: int32 ``[tokens]`` number of the word each token belongs to; -1 for none.
    """

    offsets: npt.NDArray[np.int32]
    special: npt.NDArray[np.bool_]
    words: npt.NDArray[np.int32]

    def take(self, kept: npt.NDArray[Any]) -> Places:
        """The places of some of the tokens."""
        return Places(offsets=self.offsets[kept], special=self.special[kept], words=self.words[kept])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokenized:
    """One item, ready to run.

    Attributes:
        ids: int32 ``[tokens]``, special tokens and prompt included.
        truncated: Whether the text was cut.
        types: int8 ``[tokens]`` token types; ``None`` is all 0.
        attended: Only this many tokens, the first, may be attended to; ``None`` is all.
        kept: bool ``[tokens]`` rows that a per-token result has; ``None`` is all.
        places: Where the tokens come from, where that was asked for.
    """

    ids: npt.NDArray[np.int32]
    truncated: bool
    types: npt.NDArray[np.int8] | None = None
    attended: int | None = None
    kept: npt.NDArray[np.bool_] | None = None
    places: Places | None = None


class TextTokenizer:
    """A checkpoint's tokenizer with truncation of its own: special tokens and prompts are never cut."""

    def __init__(
        self,
        backend: Tokenizer,
        *,
        lower: bool,
        limit: int | None,
        stand_in: int | None = None,
        chat: Callable[[], Any] | None = None,
        reward_token: int | None = None,
        typed: bool = False,
        specials: Mapping[str, str] | None = None,
    ) -> None:
        # Files often carry the padding and truncation of somebody's training run.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._lower = lower
        self._stand_in = stand_in
        self._chat = chat  # gives transformers' own tokenizer
        self.reward_token = reward_token  # put behind a conversation by reward models that read their score there
        self.limit = limit
        self.typed = typed  # whether the checkpoint reads token types
        self.specials = dict(specials or {})  # special tokens by role (bos_token and so on), as templates call them
        self._divides = _divides_at_spaces(backend)
        probe = backend.encode("a").special_tokens_mask
        self._prefix = next((i for i, special in enumerate(probe) if not special), len(probe))
        self._suffix = next((i for i, special in enumerate(reversed(probe)) if not special), 0)

    @classmethod
    def load(cls, folder: Path, *, lower: bool, reward_token: int | None = None) -> TextTokenizer:
        """Read the tokenizer of a checkpoint, as transformers would.

        Raises:
            ModelLoadError: There is none, or it is no fast one.
        """
        if not any(path.is_file() for pattern in _VOCABULARIES for path in folder.glob(pattern)):
            # transformers would make an empty tokenizer up, and every text would be unknown tokens.
            raise ModelLoadError(f"{folder} has no tokenizer that can be read here; is the checkpoint complete?")
        read = read_as_is(folder)
        if read is not None:
            backend, limit, specials, typed = read.backend, read.limit, read.specials, read.typed
            chat = partial(_read_by_transformers, folder)
        else:
            tokenizer = _read_by_transformers(folder)
            backend, limit = tokenizer.backend_tokenizer, tokenizer.model_max_length
            specials = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
            typed = "token_type_ids" in tokenizer.model_input_names
            chat = partial(_itself, tokenizer)
        roles = ("eos_token", "bos_token", "pad_token")
        stand_ins = (backend.token_to_id(specials[role]) for role in roles if role in specials)
        return cls(
            backend,
            lower=lower,
            limit=None if limit is None or limit > _NO_LIMIT else int(limit),
            stand_in=next((token for token in stand_ins if token is not None), None),
            chat=chat,
            reward_token=reward_token,
            typed=typed,
            specials=specials,
        )

    @cached_property
    def transformers(self) -> Any:
        """transformers' own tokenizer, for its chat template; ``None`` where there is none."""
        return None if self._chat is None else self._chat()

    @cached_property
    def hf_tokenizer(self) -> Any:
        """transformers' tokenizer for a user: a copy, since it keeps the truncation and padding of its last call."""
        return copy.deepcopy(self.transformers)

    def token_id(self, token: str) -> int | None:
        """A token's id, if the vocabulary has it."""
        return self._backend.token_to_id(token)

    def count(self, text: str) -> int:
        """How many tokens a text has, special ones included."""
        return len(self._encode([text])[0])

    def ids(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Token ids of each text, uncut."""
        if self._lower:
            texts = [_LOWER.normalize_str(text) for text in texts]
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        return [encoding.ids for encoding in encodings]

    def clipped(self, texts: Sequence[str], tokens: int) -> list[str]:
        """The beginning of each text, of at most ``tokens`` tokens, special ones aside."""
        kept = []
        for text, encoding in zip(texts, self.encode_rendered(texts, special_tokens=False, offsets=True), strict=True):
            if len(encoding.ids) <= tokens:
                kept.append(text)
                continue
            offsets = np.array(encoding.offsets[: tokens + 1], dtype=np.int32).reshape(-1, 2)
            offsets = _unfolded(offsets, text) if self._lower else offsets
            # A character may be several tokens: one that would be halved is left out.
            kept.append(text[: min(int(offsets[:tokens, 1].max(initial=0)), int(offsets[tokens, 0]))])
        return kept

    def colbert(self, late: LateInteraction) -> ColbertEncoder:
        """The same tokenizer as a late-interaction checkpoint uses it."""
        mask, end, unknown = (
            self._backend.token_to_id(self.specials.get(role, "")) for role in ("mask_token", "eos_token", "unk_token")
        )
        return ColbertEncoder(
            Tokenizer.from_str(self._backend.to_str()), late, mask=mask, end=end, unknown=unknown, lower=self._lower
        )

    def read_whole(
        self, texts: Sequence[str], *, prompt: str
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """Every token of each text, uncut: ``(its own, what stands in front, what stands behind)``."""
        whole = []
        before = len(self.fold(prompt))
        for encoding in self._encode([prompt + text for text in texts], places=bool(prompt)):
            ids = np.array(encoding.ids, dtype=np.int32)
            front, end = self._prefix, len(ids) - self._suffix
            if prompt:
                front += _within(encoding.offsets[front:end], before)
            whole.append((ids[front:end], ids[:front], ids[end:]))
        return whole

    def converse(self, conversation: Sequence[Mapping[str, str]], position: int) -> tuple[list[int], int]:
        """Token ids of a conversation by the checkpoint's chat template, and how many of the last are the template's.

        Raises:
            InvalidRequestError: The checkpoint has no template, or the template refuses the messages.
        """
        if self.transformers is None or not getattr(self.transformers, "chat_template", None):
            raise InvalidRequestError(
                f"the conversation at index {position} needs a chat template, and this checkpoint has none; "
                "render it yourself and pass the text"
            )
        ids = self._conversation_ids(conversation, position)
        # What stays where the last message says nothing is the template's: a reward is read behind it.
        emptied = [*conversation[:-1], {**conversation[-1], "content": ""}] if conversation else []
        bare = self._conversation_ids(emptied, position)
        pairs = zip(reversed(ids), reversed(bare), strict=False)
        tail = min(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)), len(ids) - 1)
        return (ids, tail) if self.reward_token is None else ([*ids, self.reward_token], tail + 1)

    def _conversation_ids(self, conversation: Sequence[Mapping[str, str]], position: int) -> list[int]:
        assert self.transformers is not None
        text = render_chat(self.transformers, conversation, index=position, model="the checkpoint")
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError(
                f"the conversation at index {position} holds a lone surrogate, which is no character; replace it"
            ) from error
        return ids

    def fold(self, text: str) -> str:
        """``text`` in lower case, where the checkpoint wants that."""
        return _LOWER.normalize_str(text) if self._lower else text

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Encoding]:
        """Each pair, uncut, in the tokenizer's own pair template."""
        return self._backend.encode_batch_fast([(self.fold(first), self.fold(second)) for first, second in pairs])

    def encode_rendered(self, texts: Sequence[str], *, special_tokens: bool, offsets: bool = False) -> list[Encoding]:
        """Each text, uncut, with the tokenizer's special tokens around it or without them."""
        encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
        return encode([self.fold(text) for text in texts], add_special_tokens=special_tokens)

    def nothing(self, position: int) -> Tokenized:
        """What runs for an item of the caller's list that has no tokens at all.

        Raises:
            InvalidRequestError: No special token can stand in.
        """
        return self._nothing(position, places=False)

    def prompt_length(self, prompt: str) -> int:
        """Tokens at the front that belong to ``prompt``, leading special ones too, as sentence-transformers counts."""
        return len(self._encode([prompt])[0].ids) - self._suffix if prompt else 0

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt: str,
        limit: int,
        truncate: Truncate,
        position: Callable[[int], int],
        places: bool = False,
        noun: str = "text",
    ) -> list[Tokenized]:
        """Tokenize ``prompt + text`` for each text, to at most ``limit`` tokens.

        Args:
            texts: The texts.
            prompt: Put before each.
            limit: Most tokens of each result.
            truncate: Which end of the text is cut.
            position: A text's index in the caller's list, for errors.
            places: Tell where the tokens come from, too.
            noun: What the texts are called in errors.

        Raises:
            InputTooLongError: A text is too long and ``truncate="error"``, or prompt and special tokens fill the limit.
        """
        whole = [prompt + text for text in texts] if prompt else texts
        encodings = (
            self._encode_heads(whole, limit, places=places) if truncate == "end" else self._encode(whole, places=places)
        )
        tokenized = []
        for i, ids in enumerate(_arrays([encoding.ids for encoding in encodings])):
            if len(ids) == 0:
                tokenized.append(self._nothing(position(i), places=places))
                continue
            found = self._places(encodings[i], prompt, texts[i]) if places else None
            cut = len(ids) > limit
            if cut:
                if truncate == "error":
                    raise InputTooLongError(
                        f"the {noun} at index {position(i)} has {len(ids)} tokens, more than max_length={limit}; "
                        'shorten it, or let it be cut with truncate="end"',
                        index=position(i),
                        tokens=len(ids),
                        limit=limit,
                    )
                kept = self._cut(len(ids), texts[i], prompt, limit, truncate)
                ids = ids[kept]
                if found is not None:
                    found = found.take(kept)
            tokenized.append(Tokenized(ids=ids, truncated=cut, places=found))
        return tokenized

    def _encode_heads(self, texts: Sequence[str], limit: int, *, places: bool) -> list[Encoding]:
        """Each text's encoding, or of a long one that of its head, where that has more than ``limit`` tokens alone."""
        most = _HEAD * limit
        if not self._divides or all(len(text) <= 2 * most for text in texts):
            return self._encode(texts, places=places)
        # Up to a space: what is in front of it is divided without a look behind it.
        heads = [text if len(text) <= 2 * most else text[: text.rfind(" ", 0, most) + 1 or None] for text in texts]
        encodings = self._encode(heads, places=places)
        short = [
            i
            for i, (text, head) in enumerate(zip(texts, heads, strict=True))
            if len(head) < len(text) and len(encodings[i]) <= limit
        ]
        if short:
            for i, encoding in zip(short, self._encode([texts[i] for i in short], places=places), strict=True):
                encodings[i] = encoding
        return encodings

    def _encode(self, texts: Sequence[str], *, places: bool = False) -> list[Encoding]:
        if self._lower:
            texts = [_LOWER.normalize_str(text) for text in texts]
        if len(texts) == 1 and len(texts[0]) <= _QUICK:
            return [self._backend.encode(texts[0])]  # which keeps the lock
        texts = list(texts)
        # The fast variant leaves the offsets out.
        return self._backend.encode_batch(texts) if places else self._backend.encode_batch_fast(texts)

    def _nothing(self, position: int, *, places: bool) -> Tokenized:
        """The form of a text that has none (the empty one, with a tokenizer that adds no special tokens)."""
        if self._stand_in is None:
            raise InvalidRequestError(
                f"the text at index {position} has no tokens, and this tokenizer has no special token to stand in; "
                "leave empty texts out"
            )
        nowhere = Places(
            offsets=np.zeros((1, 2), dtype=np.int32),
            special=np.ones(1, dtype=np.bool_),
            words=np.full(1, -1, dtype=np.int32),
        )
        ids = np.array([self._stand_in], dtype=np.int32)
        return Tokenized(ids=ids, truncated=False, places=nowhere if places else None)

    def _cut(self, length: int, text: str, prompt: str, limit: int, truncate: Truncate) -> npt.NDArray[np.int64]:
        """Which of ``length`` tokens stay: front (special tokens, prompt), part of the text, suffix."""
        if prompt and self._divides:  # what stands behind the next space is neither here nor there
            text = text[: text.find(" ", 1) + 1 or None]
        front = self._prefix + (self._prompt_tokens(prompt + text, prompt) if prompt else 0)
        end = length - self._suffix
        room = limit - front - self._suffix
        if room < 1:
            raise InputTooLongError(
                f"prompt and special tokens take {front + self._suffix} of max_length={limit} tokens, which leaves "
                "none for the text; shorten the prompt or raise max_length"
            )
        first = front if truncate == "end" else end - room
        return np.concatenate((np.arange(front), np.arange(first, first + room), np.arange(end, length)))

    def _prompt_tokens(self, text: str, prompt: str) -> int:
        """Tokens, special ones aside, of the prompt alone."""
        if self._lower:
            text, prompt = _LOWER.normalize_str(text), _LOWER.normalize_str(prompt)
        return _within(self._backend.encode(text, add_special_tokens=False).offsets, len(prompt))

    def _places(self, encoding: Encoding, prompt: str, text: str) -> Places:
        """An encoding's places in ``text``; the tokens of ``prompt``, in front, have none."""
        offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        if self._lower:
            offsets = _unfolded(offsets, prompt + text)
        offsets -= len(prompt)
        inside = offsets[:, 1] > 0 if prompt else np.ones(len(offsets), dtype=np.bool_)
        offsets = offsets.clip(min=0)
        special = np.array(encoding.special_tokens_mask, dtype=np.bool_) | ~inside
        unknown = self._backend.token_to_id(self.specials.get("unk_token", ""))
        marked = getattr(self._backend.model, "continuing_subword_prefix", None)  # what continuing tokens begin with
        words = word_numbers(
            offsets,
            special,
            np.array(encoding.ids, dtype=np.int32) == (-1 if unknown is None else unknown),
            text,
            tokens=encoding.tokens if marked else None,
        )
        return Places(offsets=offsets, special=special, words=words)


def _read_by_transformers(folder: Path) -> Any:
    """The class that transformers chooses, without what somebody's training run left in its file."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        with quiet_transformers(), warnings.catch_warnings():
            # It reads a config.json whose model_type it does not know as a bare one, and finds old fields in it.
            warnings.simplefilter("ignore", FutureWarning)
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except StrictDataclassError as error:  # transformers reads config.json on the way to the tokenizer's class
        raise ModelLoadError(f"{folder}: config.json does not fit its model's class: {error}") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
        raise ModelLoadError(f"{folder} has no tokenizer that can be read here: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    return tokenizer


def _divides_at_spaces(backend: Tokenizer) -> bool:
    """Whether a text's tokens in front of a space depend on nothing behind it: BERT's way, and no token has a space."""
    return (
        isinstance(backend.pre_tokenizer, BertPreTokenizer)
        and isinstance(backend.normalizer, BertNormalizer | None)
        and not any(" " in token.content for token in backend.get_added_tokens_decoder().values())
    )


def _itself(tokenizer: Any) -> Any:
    return tokenizer


def _arrays(lists: Sequence[list[int]]) -> list[npt.NDArray[np.int32]]:
    """Each list as int32 ``[tokens]``: parts of one array, since making many small ones takes longer."""
    if len(lists) == 1:
        return [np.array(lists[0], dtype=np.int32)]
    flat = np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=sum(map(len, lists)))
    arrays, start = [], 0
    for ids in lists:
        arrays.append(flat[start : start + len(ids)])
        start += len(ids)
    return arrays


def _unfolded(offsets: npt.NDArray[np.int32], text: str) -> npt.NDArray[np.int32]:
    """Offsets ``[tokens, 2]`` in a text's lower case as offsets in the text: "İ" is two characters there."""
    if len(_LOWER.normalize_str(text)) == len(text):
        return offsets
    lengths = [len(_LOWER.normalize_str(letter)) for letter in text]
    origin = np.append(np.repeat(np.arange(len(text)), lengths), len(text))
    starts, stops = offsets[:, 0], offsets[:, 1]
    lasts = np.where(stops > starts, origin[np.maximum(stops - 1, 0)] + 1, origin[starts])
    return np.stack((origin[starts], lasts), axis=1).astype(np.int32)


def _within(offsets: Sequence[tuple[int, int]], end: int) -> int:
    """How many tokens, at the front, lie before character ``end``.

    One that reaches over it does not: many tokenizers have the space behind a prompt in the text's first token.
    """
    return next((i for i, (_, stop) in enumerate(offsets) if stop > end), len(offsets))
