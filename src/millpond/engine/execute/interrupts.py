"""Interrupts: Ctrl-C deferred while a thread holds resources that others need, and recognized at the end of a block."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

try:
    # Without the conversion of handlers to enums in Python's wrappers, which takes 2 to 4 microseconds each time.
    from _signal import getsignal as _handler_of  # type: ignore[import-not-found]
    from _signal import signal as _set_handler
except ImportError:  # not CPython
    from signal import getsignal as _handler_of
    from signal import signal as _set_handler


class defer_sigint:  # noqa: N801  # a context
    """Defer KeyboardInterrupt to the end of the block, whose interruption would leave other callers stuck.

    Only in the main thread, which alone is ever interrupted, and only if Python's own handler would raise it: a
    program's own handler stays in place.
    """

    def __init__(self) -> None:
        self._replaces = False
        self._interrupted = False

    def __enter__(self) -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and _handler_of(signal.SIGINT) is signal.default_int_handler
        ):
            _set_handler(signal.SIGINT, self._note)
            self._replaces = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._replaces:
            _set_handler(signal.SIGINT, signal.default_int_handler)
            if self._interrupted:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True


def is_interrupt(error: BaseException | None) -> bool:
    """Whether ``error`` ends the program or a task: KeyboardInterrupt, SystemExit or a cancellation."""
    return error is not None and not isinstance(error, Exception)
