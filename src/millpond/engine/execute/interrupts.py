"""Interrupts: Ctrl-C deferred while a thread holds resources that others need, and recognized at the end of a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Defer KeyboardInterrupt to the end of the block, whose interruption would leave other callers stuck.

    Only in the main thread, which alone is ever interrupted, and only if Python's own handler would raise it: a
    program's own handler stays in place.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        signals.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if signals:
            raise KeyboardInterrupt


def is_interrupt(error: BaseException | None) -> bool:
    """Whether ``error`` ends the program or a task: KeyboardInterrupt, SystemExit or a cancellation."""
    return error is not None and not isinstance(error, Exception)
