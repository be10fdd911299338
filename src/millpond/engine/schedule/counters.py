"""Counters: totals of an engine's work, and the observers that are called for each batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from time import perf_counter

from millpond.errors import EngineClosedError
from millpond.values.stats import BatchRun, EngineStats

logger = logging.getLogger(__name__)

Observer = Callable[[BatchRun], object]


class Counters:
    """An engine's counters; those of calls change under the lock of :class:`~.admission.Admission`."""

    def __init__(self) -> None:
        self._listeners: tuple[Observer, ...] = ()
        self._running: list[float] = []  # when each batch began
        self._lock = threading.Lock()
        self._batches = self._texts = self._tokens = 0
        self._seconds = 0.0
        self._done = self._failed = self._cancelled = self._rejected = 0
        self._texts_done = self._truncated = self._hits = self._misses = 0

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` after every batch, until the returned function is called."""
        levels = iter((logging.ERROR,))

        def hear(batch: BatchRun) -> None:
            try:
                observer(batch)
            except Exception:  # the batch is fine; a traceback per batch would fill the log
                logger.log(next(levels, logging.DEBUG), "an observer of batches failed: %r", observer, exc_info=True)

        with self._lock:
            self._listeners += (hear,)

        def forget() -> None:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not hear)

        return forget

    def begin(self) -> float:
        """A batch begins; returns when, for :meth:`end` and :meth:`ran`."""
        now = perf_counter()
        self._running.append(now)
        return now

    def ran(self, begun: float, texts: int, tokens: int) -> None:
        """A batch that began at ``begun`` has run."""
        seconds = perf_counter() - begun
        with self._lock:
            self._batches += 1
            self._texts += texts
            self._tokens += tokens
            self._seconds += seconds
        for hear in self._listeners:
            hear(BatchRun(texts=texts, tokens=tokens, seconds=seconds))

    def end(self, begun: float) -> None:
        """A batch is over, whether it ran or not."""
        self._running.remove(begun)

    def reject(self) -> None:
        """A call was refused."""
        self._rejected += 1

    def release(self, error: BaseException | None, *, texts: int, truncated: int, hits: int, misses: int) -> None:
        """A call is over, with an ``error`` or without."""
        if error is None:
            self._done += 1
            self._texts_done += texts
            self._truncated += truncated
        elif isinstance(error, CancelledError | EngineClosedError):
            self._cancelled += 1
        else:
            self._failed += 1
        self._hits += hits
        self._misses += misses

    @property
    def truncated(self) -> int:
        """Texts that were cut."""
        return self._truncated

    def read(self, *, waiting_texts: int, running_calls: int) -> EngineStats:
        """The counters."""
        with self._lock:
            return EngineStats(
                waiting_texts=waiting_texts,
                running_calls=running_calls,
                running_batches=len(self._running),
                calls_done=self._done,
                calls_failed=self._failed,
                calls_cancelled=self._cancelled,
                calls_rejected=self._rejected,
                texts_done=self._texts_done,
                texts_truncated=self._truncated,
                batches=self._batches,
                batch_texts=self._texts,
                batch_tokens=self._tokens,
                batch_seconds=self._seconds,
                cache_hits=self._hits,
                cache_misses=self._misses,
            )
