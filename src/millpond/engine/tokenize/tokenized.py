"""Tokenized: one item's token ids, and where each token lies in its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt


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
