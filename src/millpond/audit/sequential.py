"""ShareBounds: how many rows are off, bounded at every moment of a sample that may stop whenever it knows enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

# The weights of the shares before anything is seen, half by half: few rows are off (Beta(1, 200)), or any number.
_PRIORS = ((1.0, 200.0), (1.0, 1.0))
_STEPS = 60  # of a bisection: the bounds are exact to 1e-12


@dataclass(frozen=True, kw_only=True)
class ShareBounds:
    """The share of rows that are off, after some rows of a random order.

    The bounds are a confidence sequence: with probability ``confidence`` the true share is between them after every
    number of rows at once, so that a run may look at them as often as it likes and stop when it wants. A share ``p`` is
    outside once the likelihood of what was seen, mixed over two Beta distributions, is ``1 / (1 - confidence)`` times
    that under ``p`` (Robbins 1970; the ratio is a martingale, whose maximum Ville's inequality bounds).

    Attributes:
        off: How many rows were off.
        rows: How many rows were looked at.
        total: How many rows there are.
        confidence: Above 0, below 1.
    """

    off: int
    rows: int
    total: int
    confidence: float

    @property
    def low(self) -> float:
        """The least share."""
        seen = self.off / self.total if self.total else 0.0
        if self.rows >= self.total or self.off == 0:
            return seen
        return max(seen, self._crossing(0.0, self.off / self.rows))

    @property
    def high(self) -> float:
        """The largest share."""
        if self.rows >= self.total:
            return self.off / self.total if self.total else 0.0
        most = (self.off + self.total - self.rows) / self.total  # if every other row were off
        if self.rows == 0:
            return 1.0
        return min(most, self._crossing(1.0, self.off / self.rows))

    def is_known_to(self, margin: float) -> bool:
        """Whether the bounds are at most so far apart; of a share that is not small, a tenth of it.

        Args:
            margin: A share.

        Returns:
            ``True`` once more rows would say little.
        """
        return self.high - self.low <= max(margin, 0.1 * self.low)

    def _crossing(self, outside: float, inside: float) -> float:
        """The bound between a share that is outside, and one that is inside."""
        for _ in range(_STEPS):
            middle = (outside + inside) / 2
            if self._is_outside(middle):
                outside = middle
            else:
                inside = middle
        return outside

    def _is_outside(self, share: float) -> bool:
        if share in (0.0, 1.0):
            return (share == 0.0 and self.off > 0) or (share == 1.0 and self.off < self.rows)
        fits = self.rows - self.off
        mixed = [_log_beta(a + self.off, b + fits) - _log_beta(a, b) - math.log(len(_PRIORS)) for a, b in _PRIORS]
        likelihood = max(mixed) + math.log(sum(math.exp(each - max(mixed)) for each in mixed))
        return likelihood - self.off * math.log(share) - fits * math.log1p(-share) > -math.log1p(-self.confidence)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
