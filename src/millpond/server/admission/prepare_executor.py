"""PrepareExecutor: the threads in which calls are checked and queued, and how many calls may wait for one."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from millpond.errors import EngineOverloadedError

Prepared = TypeVar("Prepared")

THREADS = 16
# Calls in a thread or waiting for one; more of them would only wait for each other.
_MAX_PREPARING = 1024


class PrepareExecutor:
    """Threads for preparing calls, separate from those that parse bodies and write responses."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="millpond-desk")
        self._lock = threading.Lock()
        self._preparing = 0

    def submit(self, work: Callable[[], Prepared]) -> Future[Prepared]:
        """Start ``work`` in a thread, in the caller's context.

        Raises:
            EngineOverloadedError: Too many calls wait for a thread.
        """
        with self._lock:
            if self._preparing >= _MAX_PREPARING:
                raise EngineOverloadedError(
                    f"{self._preparing} requests are being prepared, which is the most; retry in about 1 s",
                    retry_after=1.0,
                )
            self._preparing += 1
        future = self._threads.submit(contextvars.copy_context().run, work)
        future.add_done_callback(self._release)
        return future

    def close(self) -> None:
        """Let the threads end when their work is done."""
        self._threads.shutdown(wait=False)

    def _release(self, _: Future[Any]) -> None:
        with self._lock:
            self._preparing -= 1
