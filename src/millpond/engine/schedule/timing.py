"""Timing: how long the stages of one call take, and the future that has these times."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import TypeVar

from millpond.support.fork import ProcessFuture
from millpond.values.stats import Timings

Output = TypeVar("Output")


class CallFuture(ProcessFuture[Output]):
    """A call's result; in a forked child, :class:`~millpond.errors.EngineClosedError` if it was not there yet.

    Attributes:
        timings: Where the time went; set before the result is. ``None`` until then, and if the call failed.
    """

    timings: Timings | None = None


class CallTimer:
    """Measures a call from admission on; the calls of one request share a timer."""

    def __init__(self) -> None:
        self._begun = perf_counter()
        self._tokenization = 0.0
        self._queue: float | None = None  # until the first batch was picked
        self._inference = 0.0
        self._batches = 0  # running
        self._since = 0.0  # when the first of the running batches was picked
        self._lock = threading.Lock()  # of this call alone: only threads that work on it meet here

    def tokenized(self, seconds: float) -> None:
        """Count the seconds that tokenizing some of the texts took."""
        with self._lock:
            self._tokenization += seconds

    def picked(self) -> None:
        """A batch with some of the texts begins."""
        now = perf_counter()
        with self._lock:
            if self._queue is None:
                self._queue = max(0.0, now - self._begun - self._tokenization)
            if self._batches == 0:
                self._since = now
            self._batches += 1

    def returned(self) -> None:
        """A batch with some of the texts is over, or they were put back into the queue."""
        now = perf_counter()
        with self._lock:
            if self._batches == 0:  # of a batch that ended in two parts, on a device that was lost
                return
            self._batches -= 1
            if self._batches == 0:
                self._inference += now - self._since

    def read(self) -> Timings:
        """The times until now."""
        now = perf_counter()
        with self._lock:
            running = now - self._since if self._batches else 0.0
            return Timings(
                tokenization=self._tokenization,
                queue=self._queue or 0.0,
                inference=self._inference + running,
                total=now - self._begun,
            )
