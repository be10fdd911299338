"""PrepareExecutor: the threads in which calls are checked and queued, and how many calls may wait for one."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

from fastapi import Request

from millpond.errors import EngineOverloadedError

Prepared = TypeVar("Prepared")

THREADS = 16
# Large requests have threads of their own: most of their time they wait for their turn at the tokenizer.
_LARGE_THREADS = 4
_LARGE_BYTES = 1 << 16
# Calls in a thread or waiting for one; more of them would only wait for each other.
_MAX_PREPARING = 1024


class PrepareExecutor:
    """Threads for preparing calls, separate from those that parse bodies and write responses."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="millpond-desk")
        self._large_threads = ThreadPoolExecutor(_LARGE_THREADS, thread_name_prefix="millpond-large-desk")
        self._lock = threading.Lock()
        self._preparing = 0

    def submit(self, work: Callable[[], Prepared], *, body_bytes: int = 0) -> Future[Prepared]:
        """Start ``work`` in a thread, in the caller's context."""
        with self._lock:
            if self._preparing >= _MAX_PREPARING:
                raise EngineOverloadedError(
                    f"{self._preparing} requests are being prepared, which is the most; retry in about 1 s",
                    retry_after=1.0,
                )
            self._preparing += 1
        threads = self._large_threads if body_bytes > _LARGE_BYTES else self._threads
        future = threads.submit(contextvars.copy_context().run, work)
        future.add_done_callback(self._release)
        return future

    def close(self) -> None:
        """Let the threads end when their work is done."""
        self._threads.shutdown(wait=False)
        self._large_threads.shutdown(wait=False)

    def _release(self, _: Future[Any]) -> None:
        with self._lock:
            self._preparing -= 1


def prepare_executor_of(request: Request) -> PrepareExecutor:
    """The threads in which calls are prepared."""
    return cast("PrepareExecutor", request.app.state.prepare_executor)
