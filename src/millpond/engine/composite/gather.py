"""Gather: one future over several, for results that take more than one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import suppress
from typing import Any

from millpond.engine.schedule.timing import CallFuture, CallTimer


def combine(
    starts: Sequence[Callable[[], Future[Any]]],
    assemble: Callable[[list[Any]], Any],
    threads: Executor | None,
    timer: CallTimer,
) -> CallFuture[Any]:
    """A future of ``assemble([results])``; the parts share the ``timer``.

    If a part fails, the future fails with its error and the other parts are cancelled; if the future is cancelled, so
    are all parts. ``assemble`` runs in ``threads``, since the thread that finishes a part has batches to run; without
    them, or if they are shut down, it runs there.
    """
    parts: list[Future[Any]] = []
    try:
        for start in starts:
            parts.append(start())
    except BaseException:
        for part in parts:
            part.cancel()
        raise
    gathering = _Gathering(parts, assemble, threads, timer)
    gathering.whole.add_done_callback(gathering.whole_done)
    for part in parts:
        part.add_done_callback(gathering.part_done)
    return gathering.whole


class _Gathering:
    """The future of a whole, and what its parts' ends do to it."""

    def __init__(
        self,
        parts: Sequence[Future[Any]],
        assemble: Callable[[list[Any]], Any],
        threads: Executor | None,
        timer: CallTimer,
    ) -> None:
        self.whole: CallFuture[Any] = CallFuture()
        self._parts = parts
        self._assemble = assemble
        self._threads = threads
        self._timer = timer
        self._lock = threading.Lock()
        self._missing = len(parts)

    def part_done(self, part: Future[Any]) -> None:
        if part.cancelled() or part.exception() is not None:
            return self._give_up(part)
        with self._lock:
            self._missing -= 1
            last = self._missing == 0
        if not last:
            return
        if self._threads is None:
            return self._finish()
        try:
            self._threads.submit(self._finish)
        except RuntimeError:  # the engine was closed, and waits for nothing else
            self._finish()

    def whole_done(self, _: Future[Any]) -> None:
        if self.whole.cancelled():
            self.whole.set_running_or_notify_cancel()  # wakes threads that wait for several futures
            for part in self._parts:
                part.cancel()

    def _finish(self) -> None:
        try:
            result = self._assemble([part.result() for part in self._parts])
        except Exception as error:  # no other code would report it to the caller
            return self._fail(error)
        self.whole.timings = self._timer.read()
        with suppress(InvalidStateError):  # cancelled
            self.whole.set_result(result)

    def _give_up(self, part: Future[Any]) -> None:
        if part.cancelled():
            self.whole.cancel()
        else:
            self._fail(part.exception())
        for other in self._parts:
            other.cancel()

    def _fail(self, error: BaseException | None) -> None:
        with suppress(InvalidStateError):  # cancelled, or another part failed first
            self.whole.set_exception(error)
