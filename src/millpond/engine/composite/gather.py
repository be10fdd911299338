"""Gather: one future over several, for results that take more than one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, InvalidStateError
from typing import Any

from millpond.engine.schedule.timing import CallFuture, CallTimer


def combine(
    parts: Sequence[Future[Any]], assemble: Callable[[list[Any]], Any], threads: Executor | None, timer: CallTimer
) -> CallFuture[Any]:
    """A future of ``assemble([results])``.

    If a part fails, the future fails with its error and the other parts are cancelled; if the future is cancelled, so
    are all parts.

    Args:
        parts: At least one.
        assemble: Runs in ``threads``, since the thread that finishes a part has batches to run.
        threads: The executor; ``None``, or if it is shut down: the thread that finished the last part runs
            ``assemble``.
        timer: The timer that the parts share.
    """
    whole: CallFuture[Any] = CallFuture()
    lock = threading.Lock()
    missing = len(parts)

    def part_done(part: Future[Any]) -> None:
        nonlocal missing
        if part.cancelled() or part.exception() is not None:
            return give_up(part)
        with lock:
            missing -= 1
            last = missing == 0
        if not last:
            return
        if threads is None:
            return finish()
        try:
            threads.submit(finish)
        except RuntimeError:  # the engine was closed, and waits for nothing else
            finish()

    def finish() -> None:
        try:
            result = assemble([part.result() for part in parts])
        except Exception as error:  # no other code would report it to the caller
            _settle(whole, error=error)
        else:
            whole.timings = timer.read()
            _settle(whole, result=result)

    def give_up(part: Future[Any]) -> None:
        if part.cancelled():
            whole.cancel()
        else:
            _settle(whole, error=part.exception())
        for other in parts:
            other.cancel()

    def whole_done(_: Future[Any]) -> None:
        if whole.cancelled():
            whole.set_running_or_notify_cancel()  # wakes threads that wait for several futures
            for part in parts:
                part.cancel()

    whole.add_done_callback(whole_done)
    for part in parts:
        part.add_done_callback(part_done)
    return whole


def _settle(future: Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:  # cancelled, or another part failed first
        pass
