"""LogHistogram: counts of positive numbers in buckets of equal ratio, in constant memory."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

# Buckets of each doubling: a quantile is within 4.5 % of the true one.
_PER_OCTAVE = 8


class LogHistogram:
    """Counts numbers from ``low`` to ``high`` in buckets whose ends have the ratio ``2 ** (1 / 8)``.

    The first bucket takes everything up to ``low`` (also 0), the last one everything above ``high``. It is not
    thread-safe; its owner locks.
    """

    def __init__(self, low: float, high: float) -> None:
        self._low = low
        octaves = math.ceil(math.log2(high / low))
        self._counts = np.zeros(octaves * _PER_OCTAVE + 2, np.int64)
        self.count = 0
        self.total = 0.0
        self.least = math.nan
        self.most = math.nan

    def add(self, value: float) -> None:
        """Count a number."""
        bucket = 0 if value <= self._low else math.ceil(math.log2(value / self._low) * _PER_OCTAVE)
        self._counts[min(bucket, len(self._counts) - 1)] += 1
        self.count += 1
        self.total += value
        self.least = value if self.count == 1 else min(self.least, value)
        self.most = value if self.count == 1 else max(self.most, value)

    def add_all(self, values: npt.ArrayLike) -> None:
        """Count the numbers of an array."""
        numbers = np.asarray(values, np.float64).ravel()  # [n]
        if not len(numbers):
            return
        ratios = np.maximum(numbers, self._low) / self._low
        buckets = np.minimum(np.ceil(np.log2(ratios) * _PER_OCTAVE).astype(np.int64), len(self._counts) - 1)
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        least, most = float(numbers.min()), float(numbers.max())
        self.least = least if not self.count else min(self.least, least)
        self.most = most if not self.count else max(self.most, most)
        self.count += len(numbers)
        self.total += float(numbers.sum())

    @property
    def mean(self) -> float:
        """The mean; ``nan`` before the first number."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The number that ``share`` (0 to 1) of all numbers do not exceed, to 4.5 %; ``nan`` before the first."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(share * self.count))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        if bucket in (0, len(self._counts) - 1):  # these have one end only
            return self.least if bucket == 0 else self.most
        # The middle of the bucket by ratio; the ends are known exactly.
        middle = self._low * 2 ** ((bucket - 0.5) / _PER_OCTAVE)
        return min(max(middle, self.least), self.most)

    def buckets(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """``[b + 1]`` ends and ``[b]`` counts, from the first bucket that is not empty to the last one."""
        filled = np.flatnonzero(self._counts)
        if not len(filled):
            return np.zeros(1), np.zeros(0, np.int64)
        first, last = int(filled[0]), int(filled[-1])
        ends = self._low * 2 ** (np.arange(first - 1, last + 1) / _PER_OCTAVE)  # [b + 1]
        return ends, self._counts[first : last + 1].copy()
