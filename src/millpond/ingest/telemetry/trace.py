"""RunTrace: what a run did over time, collected in bounded memory for its report."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

# A run of seconds has a curve with this interval; it doubles whenever the series is full, to half a minute in a night.
_FIRST_INTERVAL = 0.1
_MAX_SAMPLES = 2000
_SAMPLED_VECTORS = 2000
_NAMED_FAILURES = 20
_NAMED_REASONS = 20
_REASON_CHARS = 500
# Buckets of each doubling: a quantile is within 4.5 % of the true one.
_PER_OCTAVE = 8


class LogHistogram:
    """Counts numbers from ``low`` to ``high`` in buckets whose ends have the ratio ``2 ** (1 / 8)``.

    The first bucket takes everything up to ``low`` (also 0), the last one everything above ``high``.
    """

    def __init__(self, low: float, high: float) -> None:
        self._low = low
        self._counts = np.zeros(math.ceil(math.log2(high / low)) * _PER_OCTAVE + 2, np.int64)
        self.count, self.total = 0, 0.0
        self.least = self.most = math.nan

    def add(self, values: npt.ArrayLike) -> None:
        """Count a number, or those of an array."""
        numbers = np.asarray(values, np.float64).ravel()  # [n]
        if not len(numbers):
            return
        ratios = np.maximum(numbers, self._low) / self._low
        buckets = np.minimum(np.ceil(np.log2(ratios) * _PER_OCTAVE).astype(np.int64), len(self._counts) - 1)
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        self.least = float(np.fmin(self.least, numbers.min()))
        self.most = float(np.fmax(self.most, numbers.max()))
        self.count += len(numbers)
        self.total += float(numbers.sum())

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
        first, last = int(filled[0]), int(filled[-1])
        ends = self._low * 2 ** (np.arange(first - 1, last + 1) / _PER_OCTAVE)  # [b + 1]
        return ends, self._counts[first : last + 1].copy()


@dataclass
class StageCall:
    """One call of a stage, while it runs; its rows may be set before the end of the block."""

    rows: int


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """The calls of a stage; times are seconds of one call, exact to 4.5 % but for ``longest``."""

    calls: int  # that ended, also with an error
    rows: int  # of all calls
    seconds: float  # of all calls; the stages run at the same time, so their sum may exceed the run's
    p50: float
    p95: float
    p99: float
    longest: float
    rows_per_call: float  # the median


@dataclass(frozen=True, kw_only=True)
class TraceSample:
    """The state of a run at one time."""

    seconds: float  # since the run began
    counts: Mapping[str, int]  # since the run began, by their names in `IngestReport`
    queues: Mapping[str, int]  # items that wait in each queue


class RunTrace:
    """Collects what a run does: times of its stages, counts over time, lengths of texts, a sample of vectors.

    Every method may be called from any thread, once per batch; it takes microseconds, and a row less than one. Memory
    does not grow with the run: 2,000 samples over time, and ``vectors`` rows of full width. Read it when the run has
    ended.

    Args:
        vectors: Rows to keep of those passed to :meth:`note_vectors`, each with the same chance; 0 keeps none.
        seed: Seed of their choice.
        clock: Returns seconds.

    Attributes:
        samples: The states of the run, oldest first.
        chars: Lengths of the texts in characters.
        retries: How often a write was sent again, by reason.
        failures: The first twenty records that failed: where each is, and why it failed.
    """

    def __init__(
        self, *, vectors: int = _SAMPLED_VECTORS, seed: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.samples: list[TraceSample] = []
        self.chars = LogHistogram(1, 1 << 30)
        self.retries: dict[str, int] = {}
        self.failures: list[tuple[str, str]] = []
        self._clock = clock
        self._lock = threading.Lock()
        self._start = clock()
        self._stages: dict[str, tuple[LogHistogram, LogHistogram]] = {}  # seconds and rows
        self._interval = _FIRST_INTERVAL
        self._next = 0.0  # seconds since the start
        self._random = np.random.default_rng(seed)
        self._sampled, self._offered = vectors, 0
        self._kept: FloatArray | None = None  # [vectors, d]

    @contextmanager
    def stage(self, name: str, rows: int = 0) -> Iterator[StageCall]:
        """Time the block as one call of a stage; it is counted if the block raises, too.

        The stages are ``read``, ``chunk``, ``embed`` (waiting for the engine), ``cut``, ``write`` and ``journal``. Rows
        that are not known before are set as ``rows`` of the yielded object.

        Args:
            name: The name of the stage.
            rows: The rows of the call, if they are known.

        Returns:
            A context manager that yields the call.
        """
        call = StageCall(rows)
        start = self._clock()
        try:
            yield call
        finally:
            self.note_stage(name, self._clock() - start, call.rows)

    def note_stage(self, name: str, seconds: float, rows: int = 0) -> None:
        """Count a call of a stage that was timed elsewhere.

        Args:
            name: The name of the stage.
            seconds: How long the call took.
            rows: The rows of the call.
        """
        with self._lock:
            if name not in self._stages:
                self._stages[name] = LogHistogram(1e-6, 1e5), LogHistogram(1, 1 << 30)
            for histogram, value in zip(self._stages[name], (seconds, rows), strict=True):
                histogram.add(value)

    def sample(self, counts: Mapping[str, int], queues: Mapping[str, int] | None = None, *, last: bool = False) -> None:
        """Keep the state of the run, if the previous one is old enough.

        The interval is 0.1 seconds, and doubles whenever 2,000 samples are kept (every second one then goes).

        Args:
            counts: Counts since the run began.
            queues: The number of items that wait in each queue.
            last: Whether this is the last state, which is kept in any case.
        """
        with self._lock:
            seconds = self._clock() - self._start
            if seconds < self._next and not last:
                return
            self.samples.append(TraceSample(seconds=seconds, counts=dict(counts), queues=dict(queues or {})))
            if len(self.samples) > _MAX_SAMPLES:
                self.samples = self.samples[:-1:2] + self.samples[-1:]
                self._interval *= 2
            self._next = seconds + self._interval

    def note_texts(self, chars: Sequence[int]) -> None:
        """Count the lengths of embedded texts, in characters.

        Args:
            chars: The length of each text.
        """
        with self._lock:
            self.chars.add(chars)

    def note_retry(self, reason: str) -> None:
        """Count a write that is sent again. Twenty reasons are kept; the others are counted together.

        Args:
            reason: Why it is sent again.
        """
        reason = _short(reason)
        with self._lock:
            if reason not in self.retries and len(self.retries) >= _NAMED_REASONS:
                reason = "other reasons"
            self.retries[reason] = self.retries.get(reason, 0) + 1

    def note_failure(self, where: str, reason: str) -> None:
        """Keep one of the first twenty records that failed, with its reason.

        Args:
            where: Where the record is in its source.
            reason: Why it failed.
        """
        with self._lock:
            if len(self.failures) < _NAMED_FAILURES:
                self.failures.append((_short(where), _short(reason)))

    def note_vectors(self, rows: FloatArray) -> None:
        """Offer ``rows [n, d]`` of full width to the sample of vectors.

        Each has the same chance (algorithm R of Vitter, "Random sampling with a reservoir", 1985).

        Args:
            rows: Vectors ``[n, d]``.
        """
        with self._lock:
            if not self._sampled or not len(rows):
                return
            if self._kept is None:
                self._kept = np.empty((self._sampled, rows.shape[1]), np.float32)
            ordinals = np.arange(self._offered + 1, self._offered + len(rows) + 1)  # [n], from 1
            slots = (self._random.random(len(rows)) * ordinals).astype(np.int64)  # [n]
            filling = ordinals <= self._sampled
            slots[filling] = ordinals[filling] - 1
            taken = np.flatnonzero(slots < self._sampled)
            # Of two rows for one slot the later one stays: numpy assigns in order.
            self._kept[slots[taken]] = rows[taken]
            self._offered += len(rows)

    @property
    def stages(self) -> dict[str, StageSummary]:
        """The stages in the order of their first calls."""
        with self._lock:
            return {
                name: StageSummary(
                    calls=seconds.count,
                    rows=int(rows.total),
                    seconds=seconds.total,
                    p50=seconds.quantile(0.5),
                    p95=seconds.quantile(0.95),
                    p99=seconds.quantile(0.99),
                    longest=seconds.most,
                    rows_per_call=rows.quantile(0.5),
                )
                for name, (seconds, rows) in self._stages.items()
            }

    @property
    def vectors(self) -> FloatArray:
        """``[m, d]``: the sample of the vectors; ``[0, 0]`` if there were none."""
        with self._lock:
            return np.empty((0, 0), np.float32) if self._kept is None else self._kept[: self._offered].copy()


def _short(text: str) -> str:
    return text if len(text) <= _REASON_CHARS else f"{text[:_REASON_CHARS]}..."
