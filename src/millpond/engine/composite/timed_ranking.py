"""TimedRanking: a reranking within a budget of time, in parts; who queues and awaits them is left to the engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from time import perf_counter
from typing import Self

import numpy as np
import numpy.typing as npt

from millpond.engine.composite.stop_rule import chance_of_change, least_scores
from millpond.engine.composite.time_model import TimeModel
from millpond.errors import InvalidRequestError
from millpond.tasks import ScoreMeasure, Stop
from millpond.values.inputs import Pair
from millpond.values.outputs import RerankOutput, ScoreOutput, Usage

# A part is to take a third of the time that is left, so that one that takes three times as long is not lost; and less
# if many wait for their turn.
_PARTS = 3
# Less is not worth the way to the engine's threads and back, if there is time for it; half of it if others wait.
_LEAST_TOKENS = 512
# Tokens of the very first part of an engine, whose pace nobody knows.
_PROBE_TOKENS = 128
# If only some are wanted, a part has at most half as many pairs as were scored: the stop rule is asked in time then.
_GROWTH = 2
_LEAST_PAIRS = 4
_CHANCE = 0.01  # that the best ones still change when the ranking stops


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """What a caller wants within what time."""

    seconds: float
    begun: float  # when the call did, by the clock of the ranking
    top_n: int | None  # None: all
    expected: npt.NDArray[np.float64]  # [documents] the order in which they are scored, highest first

    @classmethod
    def of(
        cls,
        budget_ms: float | None,
        *,
        documents: int,
        top_n: int | None,
        first_scores: Sequence[float] | None = None,
        begun: float,
    ) -> Self | None:
        """The budget of a call, whose documents are in the order of a first stage if it names no scores.

        ``None`` without ``budget_ms``.
        """
        if budget_ms is None:
            if first_scores is not None:
                raise InvalidRequestError(
                    "first_scores decides which documents are scored within budget_ms, and all are scored without it; "
                    "pass budget_ms, or leave first_scores out"
                )
            return None
        if isinstance(budget_ms, bool) or not isinstance(budget_ms, Real) or not 0 < float(budget_ms) < math.inf:
            raise InvalidRequestError(
                f"budget_ms={budget_ms!r} must be a positive, finite number of milliseconds; leave it out to score "
                "every document"
            )
        expected = -np.log(np.arange(1, documents + 1, dtype=np.float64))
        if first_scores is not None:
            expected = _first_scores(first_scores, documents)
        return cls(seconds=float(budget_ms) / 1000, begun=begun, top_n=top_n, expected=expected)


def _first_scores(scores: Sequence[float], documents: int) -> npt.NDArray[np.float64]:
    try:
        checked = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"first_scores={scores!r:.80} must be a list of numbers: {error}") from None
    if checked.shape != (documents,):
        raise InvalidRequestError(
            f"first_scores has the shape {checked.shape} and there are {documents} documents; pass one score for each, "
            "or leave it out if the documents are in the order of the first stage"
        )
    if not np.isfinite(checked).all():
        index = int(np.argmin(np.isfinite(checked)))
        raise InvalidRequestError(f"first_scores[{index}]={checked[index]} is not finite; pass a finite number")
    return checked


class TimedRanking:
    """Which pairs are scored next, and what the answer is; no thread and no queue.

    While it :meth:`goes_on`: wait for the turn, score the pairs of :meth:`next_part` within :meth:`left` seconds, then
    tell it what they :meth:`took`, or that they were :meth:`cut_off`.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        budget: TimeBudget,
        model: TimeModel,
        *,
        limit: int,  # most tokens of a pair
        method: ScoreMeasure,  # what the scores are going to be
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.pairs = pairs
        self._budget, self._model, self._clock, self._method = budget, model, clock, method
        self._order: list[int] = np.argsort(-budget.expected, kind="stable").tolist()
        self._tokens = [model.tokens(pairs[index], limit) for index in self._order]
        self._end = budget.begun + budget.seconds - model.margin(budget.seconds)
        self._done = 0
        self._part: list[int] = []  # indices
        self._part_begun = 0.0
        self._own_pace = 0.0  # of the last part
        self._stop: Stop = "all"
        self._scores = np.full(len(pairs), np.nan, dtype=np.float32)
        self._truncated = np.zeros(len(pairs), dtype=np.bool_)
        self._prompt_tokens = 0

    @property
    def begun(self) -> bool:
        """Whether a part was scored."""
        return self._done > 0

    def left(self) -> float:
        """Seconds in which a part must be over; 0 if there is no time left."""
        return max(0.0, self._end - self._clock())

    def goes_on(self) -> bool:
        """Whether another part is to be scored, as far as is known before the turn has come."""
        if self._stop != "all" or self._done == len(self._order):
            return False
        if self._is_certain():
            self._stop = "certain"
        elif not self._fitting(0):
            self._stop = "time"
            if self._tokens[0] * self._model.pace > self._budget.seconds:
                self._model.fits_nothing()
        return self._stop == "all"

    def next_part(self, *, waiting: int = 0) -> list[int]:
        """Indices of the pairs to be scored now, while so many others wait for their turn; none if no pair fits."""
        count = self._fitting(waiting)
        self._part = self._order[self._done : self._done + count]
        self._part_begun = self._clock()
        if not count:
            self._stop = "time"
        return self._part

    def took(self, output: ScoreOutput) -> int:
        """The scores of the part; returns their number."""
        part, seconds = self._part, self._clock() - self._part_begun
        self._own_pace = seconds / self._part_tokens
        self._model.took(self._part_tokens, seconds)
        self._scores[part] = output.scores
        self._truncated[part] = output.truncated
        self._prompt_tokens += output.usage.prompt_tokens
        self._method = output.method
        self._done += len(part)
        self._part = []
        return len(part)

    def cut_off(self) -> int:
        """The time was over before the part was, or before its turn came; or the queue had no room. Returns 0."""
        self._stop = "time"
        if self._part:
            self._model.took(self._part_tokens, self._clock() - self._part_begun, at_least=True)
        return 0

    def output(self) -> RerankOutput:
        """The documents that were scored, best first, and behind them the others in the order of the first stage."""
        output = RerankOutput.ranked(
            self._scores,
            [pair.document for pair in self.pairs],
            top_n=self._budget.top_n,
            method=self._method,
            truncated=self._truncated,
            usage=Usage(prompt_tokens=self._prompt_tokens),
            rest=self._order[self._done :],
            stopped=self._stop,
            elapsed_ms=1000 * (self._clock() - self._budget.begun),
        )
        delay = self._clock() - self._end
        if delay > 0:
            self._model.woke(delay)
        return output

    @property
    def _part_tokens(self) -> float:
        return sum(self._tokens[self._done : self._done + len(self._part)])

    def _is_certain(self) -> bool:
        best = self._budget.top_n
        if best is None or self._done < least_scores(best):
            return False
        scored, rest = self._order[: self._done], self._order[self._done :]
        scores = self._scores[scored].astype(np.float64)
        expected = self._budget.expected
        return chance_of_change(expected[scored], scores, expected[rest], best=best) < _CHANCE

    def _fitting(self, waiting: int) -> int:
        """How many pairs the next part has."""
        left, best = self.left(), self._budget.top_n
        pace = max(self._model.pace, self._own_pace)
        if left <= 0:
            return 0
        if pace <= 0:
            room = wanted = float(_PROBE_TOKENS)
        else:
            # Some score is better than none, so the first part may be one that ends in time only as often as not.
            room = left / max(self._model.slow_pace if self._done else pace, self._own_pace)
            least = _LEAST_TOKENS / (2 if waiting else 1)
            wanted = min(room, max(least, left / pace / max(_PARTS, 1 + waiting)))
        most = len(self._order) - self._done
        if best is not None:
            most = min(most, max(_LEAST_PAIRS, least_scores(best) - self._done, self._done // _GROWTH))
        count, tokens = 0, 0.0
        for more in self._tokens[self._done : self._done + most]:
            if tokens + more > wanted and (count or (pace > 0 and more > room)):
                break
            tokens += more
            count += 1
        return count
