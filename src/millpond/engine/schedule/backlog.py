"""Backlog: the items of a call that are not tokenized yet, and how many of them are tokenized next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.values.inputs import Item, size_of

# The next chunk of a call is tokenized while fewer of its texts wait than this, or fewer tokens than this
# many batches have: a fast device runs a batch in a few milliseconds, and must not wait for the tokenizer then.
_LEAST_TEXTS = 512
_LEAST_BATCHES = 3
# A chunk has the tokens of this many batches at least; the first one of a call has the tokens of one, to start sooner.
_CHUNK_BATCHES = 2
# It also has this many texts, since more sort better by length, but of long texts not more than have this many tokens.
_CHUNK_TEXTS = 1024
_CHUNK_TOKENS = 1 << 16
# Tokens of a character before any text was tokenized, and the characters that special tokens and a prompt stand for.
_PER_CHARACTER = 0.25
_MORE_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeChunk:
    """Slots of a call to be tokenized together."""

    slots: list[int]  # the slots; the longest item comes last
    tokens: float  # the estimated tokens of their items
    per_character: float  # the tokens of a character that the estimate counts on


class Backlog:
    """Hands out slots of a call in chunks, the longest items first; thread-safe.

    Longest first, so that the last batches are the cheap ones. Characters stand in for tokens: chunks are nearly
    sorted, and how many tokens a character has is learnt from the chunks before.
    """

    def __init__(
        self, items: Sequence[Item], slots: Sequence[int], *, limit: int, batch_tokens: int, feeders: int
    ) -> None:
        sizes = np.fromiter((size_of(items[slot]) for slot in slots), dtype=np.int64, count=len(slots))
        order = np.argsort(sizes, kind="stable")
        self._slots: npt.NDArray[np.int64] = np.fromiter(slots, dtype=np.int64, count=len(slots))[order]
        self._sizes: npt.NDArray[np.int64] = sizes[order]  # in characters, ascending
        self._left = len(slots)  # handed out from the end
        self._limit = limit
        self._batch_tokens = batch_tokens
        self._feeders = feeders
        self._in_flight = 0  # chunks that are being tokenized
        self._texts_in_flight = 0
        self._per_character = _PER_CHARACTER
        self._per_text = 0.0  # tokens of a text in the last chunk; 0: there was none
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """Whether every slot was handed out and is done."""
        with self._lock:
            return self._left == self._in_flight == 0

    def take(self, waiting: int) -> TokenizeChunk | None:
        """The next chunk, which is in flight until it is :meth:`done`; ``None`` if it is not time for one."""
        with self._lock:
            texts = waiting + self._texts_in_flight
            enough = texts >= _LEAST_TEXTS and texts * self._per_text >= _LEAST_BATCHES * self._batch_tokens
            if not self._left or self._in_flight >= self._feeders or enough:
                return None
            count, tokens = self._next()
            slots = self._slots[self._left - count : self._left].tolist()
            chunk = TokenizeChunk(slots=slots, tokens=tokens, per_character=self._per_character)
            self._left -= count
            self._in_flight += 1
            self._texts_in_flight += count
            self._per_text = tokens / count
            return chunk

    def done(self, chunk: TokenizeChunk, tokens: int) -> None:
        """A chunk is tokenized, has so many tokens, and waits for batches."""
        with self._lock:
            self._in_flight -= 1
            self._texts_in_flight -= len(chunk.slots)
            self._per_text = tokens / len(chunk.slots)
            # Scale this chunk's own estimate; chunks started together share the previous one.
            self._per_character = chunk.per_character * tokens / chunk.tokens

    def _next(self) -> tuple[int, float]:
        """Number of texts in the next chunk, and their estimated tokens."""
        wanted = (_CHUNK_BATCHES if self._per_text else 1) * self._batch_tokens
        most = max(_CHUNK_TEXTS, wanted)  # no text has less than one token
        sizes = self._sizes[max(0, self._left - most) : self._left][::-1]
        tokens = np.cumsum(np.minimum(self._limit, self._per_character * (sizes + _MORE_CHARACTERS)))
        enough, plenty = np.searchsorted(tokens, (wanted, _CHUNK_TOKENS)) + 1
        count = min(len(sizes), max(int(enough), min(_CHUNK_TEXTS, int(plenty))))
        return count, float(tokens[count - 1])
