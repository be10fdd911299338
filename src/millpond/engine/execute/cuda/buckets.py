"""Buckets: the few shapes that a CUDA graph is captured for, and the dummy sequences that fill a batch up to one.

A captured graph runs one number of tokens, one number of sequences and one longest sequence for ever. A batch runs in
the smallest shape that holds it: behind its own sequences stand dummy ones over the tokens that are missing (rows that
no sequence covers would be left unwritten), and behind these as many empty ones as there is room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A shape's longest sequence at least, so that few dummy sequences cover its padding.
_LEAST_LONGEST = 64
_LEAST_TOKENS = 64
_LEAST_SEQUENCES = 4


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One shape.

    Attributes:
        tokens: Rows of the packed row, dummy ones included.
        sequences: Places for sequences, dummy and empty ones included.
        longest: Most tokens of one sequence.
    """

    tokens: int
    sequences: int
    longest: int

    def tail(self, tokens: int) -> list[int]:
        """Lengths of the dummy sequences behind ``tokens`` real ones."""
        full, rest = divmod(self.tokens - tokens, self.longest)
        return [self.longest] * full + ([rest] if rest else [])


class Buckets:
    """All shapes, as rules rather than as a list."""

    def __init__(self, *, longest: int, tokens: int = 1 << 16) -> None:
        """``longest``: tokens that one sequence may have; ``tokens``: most tokens of a shape."""
        self._longest = longest
        self._tokens = tokens

    def fit(self, lengths: Sequence[int]) -> Bucket | None:
        """The smallest shape for sequences of these lengths; ``None`` where there is none.

        Of a shape's tokens less than a third are dummies, from 513 on less than a fifth, from 4,097 on less than a
        ninth (up to 64 tokens there is one shape).
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
    """Shapes from one power of two to the next: more where padding costs more than a kernel's launch."""
    return 2 if tokens <= 512 else 4 if tokens <= 4096 else 8


def _rounded(number: int, *, least: int, steps: int) -> int:
    """``number`` rounded up to one of ``steps`` equidistant values between two powers of two."""
    if number <= least:
        return least
    power = 1 << ((number - 1).bit_length() - 1)  # below the number, and at least half of it
    step = max(1, power // steps)
    return -(-number // step) * step
