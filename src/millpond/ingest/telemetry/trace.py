"""RunTrace: what a run did over time, collected in bounded memory for its report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.ingest.telemetry.histogram import LogHistogram

FloatArray = npt.NDArray[np.float32]

# A run of seconds has a curve with this interval; it doubles whenever the series is full, to half a minute in a night.
_FIRST_INTERVAL = 0.1
_MAX_SAMPLES = 2000
_SAMPLED_VECTORS = 2000
_NAMED_FAILURES = 20
_NAMED_REASONS = 20
_REASON_CHARS = 500


class StageCall:
    """One call of a stage, while it runs."""

    __slots__ = ("rows",)

    def __init__(self, rows: int) -> None:
        self.rows = rows


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """The calls of a stage; times are seconds of one call, exact to 4.5 % but for ``longest``."""

    calls: int  # calls that ended, also with an error
    rows: int  # rows of all calls
    seconds: float  # time of all calls; the stages run at the same time, so their sum may exceed the run's
    p50: float  # half of the calls took no longer
    p95: float  # 95 % of the calls took no longer
    p99: float  # 99 % of the calls took no longer
    longest: float
    rows_per_call: float  # median of the rows of a call


@dataclass(frozen=True, kw_only=True)
class TraceSample:
    """The state of a run at one time."""

    seconds: float  # seconds since the run began
    counts: Mapping[str, int]  # counts since the run began, by their names in `IngestReport`
    queues: Mapping[str, int]  # items that wait in each queue


class RunTrace:
    """Collects what a run does: times of its stages, counts over time, lengths of texts, a sample of vectors.

    Every method may be called from any thread, once per batch; it takes microseconds, and a row less than one. Memory
    does not grow with the run: 2,000 samples over time, and ``vectors`` rows of full width.

    Args:
        vectors: Rows to keep of those passed to :meth:`note_vectors`, each with the same chance; 0 keeps none.
        seed: Seed of their choice.
        clock: Returns seconds.
    """

    def __init__(
        self, *, vectors: int = _SAMPLED_VECTORS, seed: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._start = clock()
        self._stages: dict[str, _StageTimes] = {}
        self._samples: list[TraceSample] = []
        self._interval = _FIRST_INTERVAL
        self._next = 0.0  # seconds since the start
        self._chars = LogHistogram(1, 1 << 30)
        self._tokens = LogHistogram(1, 1 << 30)
        self._retries: dict[str, int] = {}
        self._failures: list[tuple[str, str]] = []
        self._reservoir = _Reservoir(vectors, seed)

    @contextmanager
    def stage(self, name: str, rows: int = 0) -> Iterator[StageCall]:
        """Time the block as one call of a stage; it is counted if the block raises, too.

        Args:
            name: The stage: ``read``, ``chunk``, ``embed`` (waiting for the engine), ``cut``, ``write``, ``journal``.
            rows: Rows that the call handles, if they are known before; else set ``rows`` of the yielded object.
        """
        call = StageCall(rows)
        start = self._clock()
        try:
            yield call
        finally:
            self.note_stage(name, self._clock() - start, call.rows)

    def note_stage(self, name: str, seconds: float, rows: int = 0) -> None:
        """Count a call of a stage that was timed elsewhere."""
        with self._lock:
            times = self._stages.get(name)
            if times is None:
                times = self._stages[name] = _StageTimes()
            times.seconds.add(seconds)
            times.rows.add(rows)

    def sample(self, counts: Mapping[str, int], queues: Mapping[str, int] | None = None, *, last: bool = False) -> None:
        """Keep the state of the run, if the previous one is old enough.

        The interval is 0.1 seconds, and doubles whenever 2,000 samples are kept (every second one then goes).

        Args:
            counts: Counts since the run began: ``read``, ``embedded``, ``cached``, ``written``, ``failed``, ...
            queues: Items that wait in each queue: ``embed``, ``write``.
            last: The run ends here: keep it in any case.
        """
        with self._lock:
            seconds = self._clock() - self._start
            if seconds < self._next and not last:
                return
            self._next = seconds + self._interval
            self._samples.append(TraceSample(seconds=seconds, counts=dict(counts), queues=dict(queues or {})))
            if len(self._samples) > _MAX_SAMPLES:
                self._samples = self._samples[:-1:2] + self._samples[-1:]
                self._interval *= 2
                self._next = seconds + self._interval

    def note_texts(self, chars: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        """Count the lengths of embedded texts, in characters and, where they are known, in tokens."""
        with self._lock:
            self._chars.add_all(chars)
            if tokens is not None:
                self._tokens.add_all(tokens)

    def note_retry(self, reason: str) -> None:
        """Count a write that is sent again. Twenty reasons are kept; the others are counted together."""
        reason = _short(reason)
        with self._lock:
            if reason not in self._retries and len(self._retries) >= _NAMED_REASONS:
                reason = "other reasons"
            self._retries[reason] = self._retries.get(reason, 0) + 1

    def note_failure(self, where: str, reason: str) -> None:
        """Keep one of the first twenty records that failed, with its reason."""
        with self._lock:
            if len(self._failures) < _NAMED_FAILURES:
                self._failures.append((_short(where), _short(reason)))

    def note_vectors(self, rows: FloatArray) -> None:
        """Offer ``rows [n, d]`` of full width to the sample of vectors."""
        with self._lock:
            self._reservoir.offer(rows)

    @property
    def stages(self) -> dict[str, StageSummary]:
        """The stages in the order of their first calls."""
        with self._lock:
            return {name: times.summary() for name, times in self._stages.items()}

    @property
    def samples(self) -> tuple[TraceSample, ...]:
        """The states of the run, oldest first."""
        with self._lock:
            return tuple(self._samples)

    @property
    def chars(self) -> LogHistogram:
        """Lengths of the texts in characters; read it when the run has ended."""
        return self._chars

    @property
    def tokens(self) -> LogHistogram:
        """Lengths of the texts in tokens, of those whose length is known; read it when the run has ended."""
        return self._tokens

    @property
    def retries(self) -> dict[str, int]:
        """How often a write was sent again, by reason."""
        with self._lock:
            return dict(self._retries)

    @property
    def failures(self) -> tuple[tuple[str, str], ...]:
        """The first twenty records that failed: where each is, and why it failed."""
        with self._lock:
            return tuple(self._failures)

    @property
    def vectors(self) -> FloatArray:
        """``[m, d]``: the sample of the vectors; ``[0, 0]`` if there were none."""
        with self._lock:
            return self._reservoir.rows()


class _StageTimes:
    """Times and rows of the calls of a stage."""

    def __init__(self) -> None:
        self.seconds = LogHistogram(1e-6, 1e5)
        self.rows = LogHistogram(1, 1 << 30)

    def summary(self) -> StageSummary:
        return StageSummary(
            calls=self.seconds.count,
            rows=int(self.rows.total),
            seconds=self.seconds.total,
            p50=self.seconds.quantile(0.5),
            p95=self.seconds.quantile(0.95),
            p99=self.seconds.quantile(0.99),
            longest=self.seconds.most,
            rows_per_call=self.rows.quantile(0.5),
        )


class _Reservoir:
    """A uniform sample of rows of a stream (algorithm R of Vitter, "Random sampling with a reservoir", 1985)."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._random = np.random.default_rng(seed)
        self._seen = 0
        self._kept: FloatArray | None = None  # [size, d]

    def offer(self, rows: FloatArray) -> None:
        """Take each of ``rows [n, d]`` with the chance that keeps the sample uniform."""
        if not self._size or not len(rows):
            return
        if self._kept is None:
            self._kept = np.empty((self._size, rows.shape[1]), np.float32)
        ordinals = np.arange(self._seen + 1, self._seen + len(rows) + 1)  # [n], from 1
        slots = (self._random.random(len(rows)) * ordinals).astype(np.int64)  # [n]
        filling = ordinals <= self._size
        slots[filling] = ordinals[filling] - 1
        taken = np.flatnonzero(slots < self._size)
        # Of two rows for one slot the later one stays: numpy assigns in order.
        self._kept[slots[taken]] = rows[taken]
        self._seen += len(rows)

    def rows(self) -> FloatArray:
        return np.empty((0, 0), np.float32) if self._kept is None else self._kept[: self._seen].copy()


def _short(text: str) -> str:
    return text if len(text) <= _REASON_CHARS else f"{text[:_REASON_CHARS]}..."
