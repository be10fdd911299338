"""TimeModel: how long an engine takes to score pairs, and how late its callers wake up; learnt from earlier calls."""

from __future__ import annotations

import threading

from millpond.values.inputs import Pair, size_of

# Tokens of a character, and of special tokens. A wrong estimate is part of the pace, which is learnt.
_PER_CHARACTER = 0.25
_MORE_TOKENS = 4
# Weights of a new value in the moving averages of the pace and of its deviation, once there are as many values.
_MEAN_WEIGHT = 1 / 8
_DEVIATION_WEIGHT = 1 / 4
# What a prediction adds to the mean, in deviations.
_DEVIATIONS = 2
# Of a pace by which no pair fits into a budget: the machine may have been busy only while it was measured.
_AGED = 0.9
# A margin is so many times the longest delay of late, which half of this many calls forget.
_DELAYS = 2.0
_KEPT_DELAY = 0.999
_LEAST_MARGIN = 0.0005  # seconds
_FIRST_MARGIN_SHARE = 0.1  # before any call waited to the end of its budget
_MARGIN_SHARE = 0.5  # of a budget, at most


class TimeModel:
    """Seconds of a token as the callers see them, so including the wait for batches of others; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._mean = 0.0
        self._deviation = 0.0
        self._delay: float | None = None  # seconds

    @staticmethod
    def tokens(pair: Pair, limit: int) -> float:
        """About how many tokens a pair has, at most ``limit``."""
        return min(float(limit), _PER_CHARACTER * size_of(pair) + _MORE_TOKENS)

    @property
    def pace(self) -> float:
        """Seconds of a token; 0: none was measured."""
        return self._mean

    @property
    def slow_pace(self) -> float:
        """Seconds that a token rarely exceeds."""
        return self._mean + _DEVIATIONS * self._deviation

    def took(self, tokens: float, seconds: float, *, at_least: bool = False) -> None:
        """Learn from a part of so many tokens; ``at_least``: nobody waited for its end."""
        pace = seconds / tokens
        with self._lock:
            if at_least and pace <= self._mean:
                return
            self._count += 1
            if self._count == 1:
                self._mean, self._deviation = pace, pace / 2
                return
            error = pace - self._mean
            self._deviation += max(_DEVIATION_WEIGHT, 1 / self._count) * (abs(error) - self._deviation)
            self._mean += max(_MEAN_WEIGHT, 1 / self._count) * error

    def fits_nothing(self) -> None:
        """A call scored nothing, since not even one pair fits: trust the pace less."""
        with self._lock:
            self._mean *= _AGED
            self._deviation *= _AGED

    def margin(self, budget: float) -> float:
        """Seconds before the end of a budget at which a caller has to stop waiting."""
        if self._delay is None:
            return _FIRST_MARGIN_SHARE * budget
        return min(_MARGIN_SHARE * budget, max(_LEAST_MARGIN, _DELAYS * self._delay))

    def woke(self, delay: float) -> None:
        """A call ended so many seconds later than it was to."""
        with self._lock:
            self._delay = max(delay, _KEPT_DELAY * (self._delay or 0.0))
