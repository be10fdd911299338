"""Clock: where the time of one call goes, and the future that tells."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from time import perf_counter
from typing import TypeVar

from millpond.stats import Timings

Result = TypeVar("Result")


class CallFuture(Future[Result]):
    """A call's result.

    Attributes:
        timings: Where the time went; there as soon as the result is. ``None`` until then, and of a call that failed.
    """

    timings: Timings | None = None


class CallTimer:
    """Runs from admission on; of a request that is made of several calls, one for all of them."""

    def __init__(self) -> None:
        self._begun = perf_counter()
        self._tokenization = 0.0
        self._queue: float | None = None  # until the first batch has been picked
        self._inference = 0.0
        self._batches = 0  # under way
        self._since = 0.0  # when the first of those was picked
        self._lock = threading.Lock()  # this call's own: threads meet at it only where they share the call

    def tokenized(self, seconds: float) -> None:
        """So long it took to tokenize some of the texts."""
        with self._lock:
            self._tokenization += seconds

    def picked(self) -> None:
        """Some of the texts are in a batch from now on."""
        now = perf_counter()
        with self._lock:
            if self._queue is None:
                self._queue = max(0.0, now - self._begun - self._tokenization)
            if self._batches == 0:
                self._since = now
            self._batches += 1

    def returned(self) -> None:
        """A batch with some of the texts is over, or was put back."""
        now = perf_counter()
        with self._lock:
            self._batches -= 1
            if self._batches == 0:
                self._inference += now - self._since

    def read(self) -> Timings:
        """Where the time went until now."""
        now = perf_counter()
        with self._lock:
            running = now - self._since if self._batches else 0.0
            return Timings(
                tokenization=self._tokenization,
                queue=self._queue or 0.0,
                inference=self._inference + running,
                total=now - self._begun,
            )
