"""Tokenized: one item's token ids, and where each token lies in its text, which may be folded to lower case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers.normalizers import Lowercase

from millpond.errors import InputTooLongError

# sentence-transformers folds letter by letter; str.lower() treats a final sigma differently.
_LOWER = Lowercase()


# What transformers changes in decoded texts of WordPiece.
_SPACES = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def clean_up(text: str) -> str:
    """``text`` without the spaces that WordPiece puts before signs and endings."""
    for spaced in _SPACES:
        text = text.replace(spaced, spaced.strip())
    return text


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenAlignment:
    """Where each token of a text comes from."""

    offsets: npt.NDArray[np.int32]  # int32 `[tokens, 2]` character spans in the caller's text, half open
    # bool `[tokens]` tokens that do not stand for text: special tokens, and a prompt's
    special: npt.NDArray[np.bool_]
    words: npt.NDArray[np.int32]  # int32 `[tokens]` number of the word that each token belongs to; -1 for none

    def take(self, kept: npt.NDArray[Any]) -> TokenAlignment:
        """The alignment of some of the tokens, chosen by a mask or by indices."""
        return TokenAlignment(offsets=self.offsets[kept], special=self.special[kept], words=self.words[kept])


@dataclass(kw_only=True, slots=True, eq=False)  # one for every text: a frozen one would take five times as long to make
class Tokenized:
    """One item, ready to run; not to be changed."""

    ids: npt.NDArray[np.int32]  # int32 `[tokens]`, special tokens and prompt included
    truncated: bool  # whether the text was cut
    types: npt.NDArray[np.int8] | None = None  # int8 `[tokens]` token types; `None`: all 0
    attended: int | None = None  # only the first `attended` tokens may be attended to; `None`: all
    kept: npt.NDArray[np.bool_] | None = None  # bool `[tokens]` rows that a per-token result contains; `None`: all
    alignment: TokenAlignment | None = None  # where the tokens come from; `None` unless requested


def id_arrays(lists: Sequence[list[int]]) -> list[npt.NDArray[np.int32]]:
    """Each list as int32 ``[tokens]``: views of one array, since many small arrays take longer to make."""
    if len(lists) == 1:
        return [np.array(lists[0], dtype=np.int32)]
    flat = np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=sum(map(len, lists)))
    arrays, start = [], 0
    for ids in lists:
        arrays.append(flat[start : start + len(ids)])
        start += len(ids)
    return arrays


def too_long(what: str, index: int, tokens: int, limit: int) -> InputTooLongError:
    """The error of an item that must not be cut; ``what``: its noun, ``index``: in the caller's list."""
    return InputTooLongError(
        f"the {what} at index {index} has {tokens} tokens, more than max_length={limit}; shorten it, or let it be cut "
        'with truncate="end"',
        index=index,
        tokens=tokens,
        limit=limit,
    )


def fold(text: str) -> str:
    """``text`` in lower case."""
    return _LOWER.normalize_str(text)


def unfold_offsets(offsets: npt.NDArray[np.int32], text: str) -> npt.NDArray[np.int32]:
    """Map offsets ``[tokens, 2]`` in the folded text to offsets in ``text``: "İ" folds to two characters."""
    if len(fold(text)) == len(text):
        return offsets
    lengths = [len(fold(letter)) for letter in text]
    origin = np.append(np.repeat(np.arange(len(text)), lengths), len(text))
    starts, stops = offsets[:, 0], offsets[:, 1]
    lasts = np.where(stops > starts, origin[np.maximum(stops - 1, 0)] + 1, origin[starts])
    return np.stack((origin[starts], lasts), axis=1).astype(np.int32)


def span_tokens(alignment: TokenAlignment, spans: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.int64]]:
    """For each half-open character span, the indices of the tokens that overlap it, ascending; special ones do not."""
    own = np.flatnonzero(~alignment.special)
    starts = alignment.offsets[own, 0]
    stops = np.maximum(alignment.offsets[own, 1], starts + 1)
    if (np.diff(starts) < 0).any() or (np.diff(stops) < 0).any():
        return [own[(starts < end) & (stops > start)] for start, end in spans]
    edges = np.array(spans, dtype=np.int64).reshape(-1, 2)  # of a book there are thousands
    firsts, lasts = np.searchsorted(stops, edges[:, 0], side="right"), np.searchsorted(starts, edges[:, 1])
    return [own[first:last] for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def word_numbers(
    offsets: npt.NDArray[np.int32],
    special: npt.NDArray[np.bool_],
    unknown: npt.NDArray[np.bool_],
    text: str,
    *,
    tokens: Sequence[str] | None,
) -> npt.NDArray[np.int32]:
    """``[tokens]`` number of each token's word in ``text``, from 0; -1 for special tokens.

    These are not the tokenizer's own words: models are evaluated with the rule of transformers' token-classification
    pipeline. Where continuing tokens carry a mark (the ``##`` of WordPiece; then there are ``tokens``, spelled as in
    the vocabulary), a token continues a word if its length differs from that of its characters; elsewhere, if no space
    precedes it, so that punctuation belongs to the word before it. An ``unknown`` token always begins a word.
    """
    starts, stops = offsets[:, 0], offsets[:, 1]
    if tokens is not None:
        lengths = np.fromiter((len(token) for token in tokens), dtype=np.int32, count=len(tokens))
        continues = lengths != stops - starts
    else:
        # With a leading space, a token at the first character begins a word; the trailing 0 only avoids an index error.
        letters = np.frombuffer(text.encode("utf-32-le"), dtype=np.int32)
        padded = np.concatenate(([ord(" ")], letters, [0]))
        starts = starts.clip(max=len(text))
        continues = (padded[starts] != ord(" ")) & (padded[starts + 1] != ord(" "))
    begins = ~special & ~(continues & ~unknown)
    begins[np.flatnonzero(~special)[:1]] = True
    return np.where(special, -1, np.cumsum(begins) - 1).astype(np.int32)
