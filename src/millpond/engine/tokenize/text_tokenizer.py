"""Texts to token ids: batched and thread-safe; the GIL is released while the tokenizer works."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from tokenizers.models import WordPiece as WordPieceModel

from millpond.checkpoints.layouts.late_interaction import LateInteraction
from millpond.checkpoints.templates.conversation import ChatTemplate, read_conversation_template
from millpond.engine.tokenize.byte_pairs import BytePairs
from millpond.engine.tokenize.conversation import read_conversation
from millpond.engine.tokenize.large_texts import turn
from millpond.engine.tokenize.long_texts import LongTexts
from millpond.engine.tokenize.native_tokenizer import NativeTokenizer
from millpond.engine.tokenize.pair_ids import PairIds, PairTemplate, read_pairs
from millpond.engine.tokenize.tokenized import (
    TokenAlignment,
    Tokenized,
    clean_up,
    fold,
    id_arrays,
    too_long,
    unfold_offsets,
    word_numbers,
)
from millpond.engine.tokenize.tokenizer_file import hf_tokenizer, tokenizer_file
from millpond.engine.tokenize.wordpiece import WordPiece
from millpond.errors import InputTooLongError, InvalidRequestError
from millpond.late_interaction.encoding.markers import ColbertEncoder
from millpond.support.cached_property import cached_property
from millpond.tasks import Truncate

# A tokenizer without a length limit stores an astronomical number.
_NO_LIMIT = 1_000_000
# Characters of a long text that are tokenized first, for each token that is kept: English has four to five.
_HEAD_PER_TOKEN = 8
# A single text of at most this many characters is tokenized without releasing the GIL: releasing it takes as long.
_HOLD_GIL_CHARACTERS = 4096
# In a longer text, long runs are looked for before it is tokenized.
_COLLAPSE_CHARACTERS = 1 << 13
# What a tokenizer makes of a text: its ids, or these with more.
Ids = TypeVar("Ids", Encoding, npt.NDArray[np.int32])


class TextTokenizer:
    """A checkpoint's tokenizer with its own truncation, which never cuts special tokens or prompts."""

    def __init__(
        self,
        backend: Tokenizer,
        *,
        lower: bool,  # whether texts are folded to lower case first
        limit: int | None,  # the tokenizer's own limit of tokens; `None`: none
        placeholder: int | None = None,  # the token that runs in place of a text without tokens
        chat: ChatTemplate | None = None,  # renders conversations
        hf_tokenizer: Callable[[], Any] | None = None,  # returns transformers' own tokenizer
        reward_token: int | None = None,  # appended to a conversation by reward models that read their score there
        typed: bool = False,  # whether the checkpoint reads token types
        specials: Mapping[str, str] | None = None,
        side: Truncate = "end",  # which end of a text is cut if the caller names none
        cleans_up: bool = False,  # whether a decoded text loses the spaces before its signs
        file: Path | None = None,  # the tokenizer.json that the backend's model is of
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._lower = lower
        self._placeholder = placeholder
        self.chat = chat
        self._hf_tokenizer = hf_tokenizer
        self.reward_token = reward_token
        self.limit = limit
        self.typed = typed
        self.specials = dict(specials or {})
        self.side: Truncate = side
        self._cleans_up = cleans_up
        self.long_texts = LongTexts(backend, self.fold)
        probe = backend.encode("a").special_tokens_mask
        self._prefix = next((i for i, special in enumerate(probe) if not special), len(probe))
        self._suffix = next((i for i, special in enumerate(reversed(probe)) if not special), 0)
        self._file = file
        self._native = self._native_of(backend)

    @classmethod
    def load(
        cls, folder: Path, *, lower: bool, reward_token: int | None = None, added: Sequence[str] = ()
    ) -> TextTokenizer:
        """Read the tokenizer of a checkpoint, as transformers would, and add special tokens that it lacks."""
        read = tokenizer_file(folder)
        backend, limit, specials = read.backend, read.limit, read.specials
        backend.add_special_tokens([token for token in added if backend.token_to_id(token) is None])
        roles = ("eos_token", "bos_token", "pad_token")
        placeholders = (backend.token_to_id(specials[role]) for role in roles if role in specials)
        return cls(
            backend,
            lower=lower,
            limit=None if limit is None or limit > _NO_LIMIT else int(limit),
            placeholder=next((token for token in placeholders if token is not None), None),
            chat=read_conversation_template(folder, specials),
            hf_tokenizer=partial(hf_tokenizer, folder),
            reward_token=reward_token,
            typed=read.typed,
            specials=specials,
            side="start" if read.cuts_start else "end",
            cleans_up=read.cleans_up,
            file=file if (file := folder / "tokenizer.json").is_file() else None,
        )

    def _native_of(self, backend: Tokenizer) -> NativeTokenizer | None:
        """The tokenizer of the compiled library; ``None``: it has none that does as ``backend`` does."""
        if isinstance(backend.model, WordPieceModel):
            return WordPiece.of(backend, lower=self._lower, prefix=self._prefix, suffix=self._suffix)
        if self._lower:
            return None
        return BytePairs.of(backend, prefix=self._prefix, suffix=self._suffix, file=self._file)

    @cached_property
    def _own_hf_tokenizer(self) -> Any:
        return None if self._hf_tokenizer is None else self._hf_tokenizer()

    @property
    def hf_tokenizer(self) -> Any:
        """transformers' tokenizer for a user: a copy, since it keeps the truncation and padding of its last call."""
        return copy.deepcopy(self._own_hf_tokenizer)

    def token_id(self, token: str) -> int | None:
        """A token's id, if the vocabulary has it."""
        return self._backend.token_to_id(token)

    def token_names(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The vocabulary's entries for token ids; ``"<id>"`` for one that it does not have."""
        return tuple(self._backend.id_to_token(number) or f"<{number}>" for number in ids)

    def has_token(self, token: int) -> bool:
        """Whether the vocabulary has a token of this id."""
        return self._backend.id_to_token(token) is not None

    @property
    def vocabulary_size(self) -> int:
        """How many tokens the vocabulary has."""
        return self._backend.get_vocab_size()

    def reaches(self, token: int) -> bool:
        """Whether a token of the vocabulary has this id or a higher one; ids of the model itself have no gaps."""
        added = self._backend.get_added_tokens_decoder()
        return self._backend.get_vocab_size(with_added_tokens=False) > token or max(added, default=-1) >= token

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        text = self._backend.decode(ids, skip_special_tokens=False)
        return clean_up(text) if self._cleans_up else text

    def count(self, text: str) -> int:
        """Number of tokens of a text, special tokens included."""
        return len(self.id_arrays([text])[0])

    def ids(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Token ids of each text, uncut."""
        return [ids.tolist() for ids in self.id_arrays(texts, special_tokens=special_tokens)]

    def special_tokens(self, *, is_pair: bool) -> int:
        """How many special tokens a text has, or a pair."""
        return self._backend.num_special_tokens_to_add(is_pair)

    def ends(self, texts: Sequence[str], tokens: int) -> list[int]:
        """How many characters of each text have ``tokens`` tokens at most; special ones are not counted."""
        encodings = self.encode_rendered(texts, special_tokens=False, offsets=True)
        ends = []
        for text, encoding in zip(texts, encodings, strict=True):
            if len(encoding.ids) <= tokens:
                ends.append(len(text))
                continue
            offsets = np.array(encoding.offsets[: tokens + 1], dtype=np.int32).reshape(-1, 2)
            offsets = unfold_offsets(offsets, text) if self._lower else offsets
            # A character may be several tokens: one whose tokens would be split is left out.
            ends.append(min(int(offsets[:tokens, 1].max(initial=0)), int(offsets[tokens, 0])))
        return ends

    def colbert(self, late: LateInteraction) -> ColbertEncoder:
        """The encoder of queries and documents of a late-interaction checkpoint, over the same tokenizer."""
        mask, end, unknown = (
            self._backend.token_to_id(self.specials.get(role, "")) for role in ("mask_token", "eos_token", "unk_token")
        )
        own = Tokenizer.from_str(self._backend.to_str())
        encoder = ColbertEncoder(own, late, mask=mask, end=end, unknown=unknown, lower=self._lower)
        encoder.read_by(lambda backend: None if (native := self._native_of(backend)) is None else native.split)
        return encoder

    def read_whole(
        self, texts: Sequence[str], *, prompt: str
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """Token ids of each text, uncut: ``(ids of the text, ids before it, ids after it)``."""
        parts = []
        before = len(self.fold(prompt))
        texts = [prompt + text for text in self._collapsed(texts)]
        encodings = self._encode(texts, offsets=True) if prompt else ()
        arrays = [np.array(each.ids, dtype=np.int32) for each in encodings] if prompt else self.id_arrays(texts)
        for i, ids in enumerate(arrays):
            front, end = self._prefix, len(ids) - self._suffix
            if prompt:
                front += _tokens_before(encodings[i].offsets[front:end], before)
            parts.append((ids[front:end], ids[:front], ids[end:]))
        return parts

    def converse(self, conversation: Sequence[Mapping[str, str]], index: int) -> tuple[list[int], int]:
        """Its token ids by the checkpoint's chat template, and how many of the last ones belong to the template."""
        if self.chat is None:
            raise InvalidRequestError(
                f"the conversation at index {index} needs a chat template, and this checkpoint has none; "
                "render it yourself and pass the text"
            )
        ids, tail = read_conversation(self._backend, self.chat, conversation, index)
        return (ids, tail) if self.reward_token is None else ([*ids, self.reward_token], tail + 1)

    def fold(self, text: str) -> str:
        """``text`` in lower case, if the checkpoint is uncased."""
        return fold(text) if self._lower else text

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[PairIds]:
        """Each pair, uncut, in the tokenizer's own pair template."""
        texts = self._collapsed([text for pair in pairs for text in pair])
        with turn(texts):
            native = None if self._pair_template is None else self._native
            return read_pairs(texts, backend=self._backend, native=native, template=self._pair_template, fold=self.fold)

    @cached_property
    def _pair_template(self) -> PairTemplate | None:
        return PairTemplate.of(self._backend, prefix=self._prefix, suffix=self._suffix)

    def encode_rendered(self, texts: Sequence[str], *, special_tokens: bool, offsets: bool = False) -> list[Encoding]:
        """Each text, uncut, with the tokenizer's special tokens around it or without them."""
        # The fast variant leaves the offsets out.
        encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
        texts = texts if offsets else self._collapsed(texts)
        with turn(texts):
            return encode([self.fold(text) for text in texts], add_special_tokens=special_tokens)

    def encode_words(self, texts: Sequence[Sequence[str]], *, special_tokens: bool) -> list[Encoding]:
        """Each text, given as words that are tokenized one by one, with special tokens around it or without them."""
        with turn([word for words in texts for word in words]):
            return self._backend.encode_batch(
                [list(words) for words in texts], is_pretokenized=True, add_special_tokens=special_tokens
            )

    def prompt_length(self, prompt: str) -> int:
        """Tokens that ``prompt`` adds at the front; leading special tokens count, as in sentence-transformers."""
        return len(self._encode([prompt])[0].ids) - self._suffix if prompt else 0

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt: str,
        limit: int,  # most tokens of each result
        truncate: Truncate,  # which end of the text is cut
        index_of: Callable[[int], int],  # a text's index in the caller's list, for errors
        align: bool = False,  # whether the results have an alignment of their tokens with the text
        noun: str = "text",  # what the texts are called in errors
    ) -> list[Tokenized]:
        """Tokenize ``prompt + text`` for each text, to at most ``limit`` tokens."""
        if not align:
            texts = self._collapsed(texts)
        prompted = [prompt + text for text in texts] if prompt else texts
        # What follows the most tokens is not read, if that end is cut.
        most = limit if truncate == "end" else None
        encodings: Sequence[Encoding] = ()
        if align:
            encodings = self._heads(prompted, most, partial(self._encode, offsets=True))
            arrays = id_arrays([encoding.ids for encoding in encodings])
        else:
            arrays = self._heads(prompted, most, self.id_arrays)
        tokenized = []
        for i, ids in enumerate(arrays):
            if len(ids) == 0:
                tokenized.append(self.placeholder(index_of(i), align=align))
                continue
            alignment = self._alignment(encodings[i], prompt, texts[i]) if align else None
            cut = len(ids) > limit
            if cut:
                if truncate == "error":
                    raise too_long(noun, index_of(i), len(ids), limit)
                kept = self._cut(len(ids), texts[i], prompt, limit, truncate)
                ids = ids[kept]
                if alignment is not None:
                    alignment = alignment.take(kept)
            tokenized.append(Tokenized(ids=ids, truncated=cut, alignment=alignment))
        return tokenized

    def placeholder(self, index: int, *, align: bool = False) -> Tokenized:
        """A special token in place of an item without tokens: an empty text, to which none are added."""
        if self._placeholder is None:
            raise InvalidRequestError(
                f"the text at index {index} has no tokens, and this tokenizer has no special token to stand in; "
                "leave empty texts out"
            )
        nowhere = TokenAlignment(
            offsets=np.zeros((1, 2), dtype=np.int32),
            special=np.ones(1, dtype=np.bool_),
            words=np.full(1, -1, dtype=np.int32),
        )
        ids = np.array([self._placeholder], dtype=np.int32)
        return Tokenized(ids=ids, truncated=False, alignment=nowhere if align else None)

    def _heads(
        self, texts: Sequence[str], limit: int | None, encode: Callable[[Sequence[str]], list[Ids]]
    ) -> list[Ids]:
        """Encode each text, or only the head of a long one if the head has more than ``limit`` tokens."""
        most = _HEAD_PER_TOKEN * (limit or 0)
        if limit is None or max(map(len, texts), default=0) <= 2 * most or not self.long_texts.splits_at_spaces:
            return encode(texts)
        # Up to a space: how the text before it is split does not depend on what follows.
        heads = [text if len(text) <= 2 * most else text[: text.rfind(" ", 0, most) + 1 or None] for text in texts]
        encodings = encode(heads)
        short = [
            i
            for i, (text, head) in enumerate(zip(texts, heads, strict=True))
            if len(head) < len(text) and len(encodings[i]) <= limit
        ]
        if short:
            for i, encoding in zip(short, encode([texts[i] for i in short]), strict=True):
                encodings[i] = encoding
        return encodings

    def one(self, text: str) -> npt.NDArray[np.int32]:
        """int32 ``[tokens]`` of one text of a few thousand characters, uncut, special tokens included."""
        ids = None if self._native is None else self._native.one(text)
        return np.array(self._encode([text])[0].ids, dtype=np.int32) if ids is None else ids

    def id_arrays(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[npt.NDArray[np.int32]]:
        """int32 ``[tokens]`` of each text, uncut, with the tokenizer's special tokens around it or without them."""
        split: list[npt.NDArray[np.int32] | None] = [None] * len(texts)
        if self._native is not None:
            with turn(texts):
                split = self._native.split(texts)
        if not special_tokens:
            split = [None if ids is None else ids[self._prefix : len(ids) - self._suffix] for ids in split]
        rest = [text for text, ids in zip(texts, split, strict=True) if ids is None]
        if not rest:
            return cast("list[npt.NDArray[np.int32]]", split)
        encodings = self._encode(rest) if special_tokens else self.encode_rendered(rest, special_tokens=False)
        own = iter(id_arrays([encoding.ids for encoding in encodings]))
        return [next(own) if ids is None else ids for ids in split]

    def _encode(self, texts: Sequence[str], *, offsets: bool = False) -> list[Encoding]:
        if len(texts) == 1 and len(texts[0]) <= _HOLD_GIL_CHARACTERS:
            return [self._backend.encode(self.fold(texts[0]))]
        return self.encode_rendered(texts, special_tokens=True, offsets=offsets)

    def _collapsed(self, texts: Sequence[str]) -> Sequence[str]:
        if max(map(len, texts), default=0) <= _COLLAPSE_CHARACTERS:
            return texts
        return [self.long_texts.collapse(text) for text in texts]

    def _cut(self, length: int, text: str, prompt: str, limit: int, truncate: Truncate) -> npt.NDArray[np.int64]:
        """Which of ``length`` tokens stay: front (special tokens, prompt), part of the text, suffix."""
        if prompt and self.long_texts.splits_at_spaces:  # what follows the first space changes nothing before it
            text = text[: text.find(" ", 1) + 1 or None]
        front = self._prefix
        if prompt:
            (encoding,) = self.encode_rendered([prompt + text], special_tokens=False, offsets=True)
            front += _tokens_before(encoding.offsets, len(self.fold(prompt)))
        end = length - self._suffix
        room = limit - front - self._suffix
        if room < 1:
            raise InputTooLongError(
                f"prompt and special tokens take {front + self._suffix} of max_length={limit} tokens, which leaves "
                "none for the text; shorten the prompt or raise max_length"
            )
        first = front if truncate == "end" else end - room
        return np.concatenate((np.arange(front), np.arange(first, first + room), np.arange(end, length)))

    def offsets_in_text(
        self, offsets: npt.NDArray[np.int32], prompt: str, text: str
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Offsets ``[tokens, 2]`` in the folded ``prompt + text`` as offsets in the text.

        Returns:
            The offsets, and bool ``[tokens]`` whether a token reaches beyond the prompt.
        """
        if self._lower:
            offsets = unfold_offsets(offsets, prompt + text)
        offsets = offsets - np.int32(len(prompt))
        inside = offsets[:, 1] > 0 if prompt else np.ones(len(offsets), dtype=np.bool_)
        return offsets.clip(min=0), inside

    def _alignment(self, encoding: Encoding, prompt: str, text: str) -> TokenAlignment:
        """The alignment of an encoding of ``prompt + text`` with ``text``; the prompt's tokens count as special."""
        offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        offsets, inside = self.offsets_in_text(offsets, prompt, text)
        special = np.array(encoding.special_tokens_mask, dtype=np.bool_) | ~inside
        unknown = self._backend.token_to_id(self.specials.get("unk_token", ""))
        marked = getattr(self._backend.model, "continuing_subword_prefix", None)  # "##" of WordPiece
        words = word_numbers(
            offsets,
            special,
            np.array(encoding.ids, dtype=np.int32) == (-1 if unknown is None else unknown),
            text,
            tokens=encoding.tokens if marked else None,
        )
        return TokenAlignment(offsets=offsets, special=special, words=words)


def _tokens_before(offsets: Sequence[tuple[int, int]], end: int) -> int:
    """How many tokens at the front end at or before character ``end``.

    A token that reaches over ``end`` does not count: many tokenizers put the space after a prompt into the text's
    first token.
    """
    return next((i for i, (_, stop) in enumerate(offsets) if stop > end), len(offsets))
