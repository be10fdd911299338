"""NativeThreads: the number of threads that a batch runs on in the compiled kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from millpond.support.processor import default_threads

# Floating-point operations of a batch for which one more thread pays. The kernels' threads steal work and never wait
# for a thread that has not started: one text of 10 tokens, 2e8 operations, takes 1.15 ms on one thread of a Zen 4 and
# 0.62 on two.
_FLOPS_PER_THREAD = 1e8

_of_batch = threading.local()


class NativeThreads:
    """The number of threads that pay for a model's batches."""

    def __init__(self, weights: int, *, most: int | None = None) -> None:
        """``weights``: numbers that every token is multiplied with; ``most``: by default the number of this process."""
        self.most = default_threads() if most is None else most
        self._per_token = 2.0 * weights

    def count(self, tokens: int, *, awake: bool = False) -> int:
        """Threads for a batch of ``tokens``, from 1 to ``most``."""
        return min(self.most, 1 + int(tokens * self._per_token / _FLOPS_PER_THREAD))

    def enter(self) -> None:
        """Do nothing: a kernel gets its threads with each call."""

    @contextmanager
    def running(self, count: int, *, awake: bool) -> Iterator[None]:
        """Context of a batch on ``count`` threads."""
        _of_batch.count = count
        try:
            yield
        finally:
            _of_batch.count = 0

    def of_batch(self) -> int:
        """The number of threads of the calling thread's batch; outside of :meth:`running` all."""
        return getattr(_of_batch, "count", 0) or self.most
