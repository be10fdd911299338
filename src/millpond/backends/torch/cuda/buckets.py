"""Buckets: the few shapes that CUDA graphs are captured for, each a number of tokens, sequences and a longest sequence.

A batch is filled up to one by dummy sequences, as rows of no sequence would not be written, then by empty ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Least longest sequence of a shape, so that few dummy sequences cover its padding.
_LEAST_LONGEST = 64
_LEAST_TOKENS = 64
_LEAST_SEQUENCES = 4


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One shape of a batch."""

    tokens: int  # rows of the packed row, dummy ones included
    sequences: int  # number of sequences, dummy and empty ones included
    longest: int  # most tokens of one sequence

    def tail(self, tokens: int) -> list[int]:
        """Lengths of the dummy sequences after ``tokens`` real ones."""
        full, rest = divmod(self.tokens - tokens, self.longest)
        return [self.longest] * full + ([rest] if rest else [])


class Buckets:
    """All shapes, by rule."""

    def __init__(self, *, longest: int, tokens: int = 1 << 16) -> None:
        """``longest``: most tokens of a sequence; ``tokens``: most tokens of a shape."""
        self._longest = longest
        self._tokens = tokens

    def fit(self, lengths: Sequence[int]) -> Bucket | None:
        """The smallest shape for sequences of these lengths; ``None`` if no shape is large enough.

        Fewer than a third of a shape's tokens are dummies; from 513 tokens on fewer than a fifth, from 4,097 on fewer
        than a ninth. Up to 64 tokens there is one shape. A large batch that would have many dummies runs without a
        graph, see :mod:`.graphs`.
        """
        total, most = sum(lengths), max(lengths)
        if most > self._longest or total > self._tokens:
            return None
        tokens = min(self._tokens, _rounded(total, least=_LEAST_TOKENS, steps=_steps(total)))
        longest = min(self._longest, _rounded(most, least=_LEAST_LONGEST, steps=1))
        dummies = -(-(tokens - total) // longest)
        sequences = _rounded(len(lengths) + dummies, least=_LEAST_SEQUENCES, steps=2)
        return Bucket(tokens=tokens, sequences=sequences, longest=longest)


def _steps(tokens: int) -> int:
    """Number of shapes from one power of two to the next: more where padding costs more than a kernel launch."""
    return 2 if tokens <= 512 else 4 if tokens <= 4096 else 8


def _rounded(number: int, *, least: int, steps: int) -> int:
    """``number`` rounded up to one of ``steps`` equidistant values between two powers of two."""
    if number <= least:
        return least
    power = 1 << ((number - 1).bit_length() - 1)  # less than the number, and at least half of it
    step = max(1, power // steps)
    return -(-number // step) * step
