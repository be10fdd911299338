"""Signals that end a run: what is in flight is written first, and the exit code is 130 (SIGINT) or 143 (SIGTERM)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millpond.ingest.pipeline.source_items import StopRequest

_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)  # Windows has no SIGHUP
)


class StopSignals:
    """What the signals do: end the process at once, since there is nothing to write yet, until a run takes them."""

    def __init__(self, finished: str = "what is embedded is written") -> None:
        self._finished = finished
        self._request: StopRequest | None = None
        self._signal: int | None = None

    @property
    def code(self) -> int | None:
        """The exit code of a run that was stopped; ``None`` if no signal came."""
        return None if self._signal is None else 128 + self._signal

    def pass_to(self, request: StopRequest) -> None:
        """From now on the first signal asks the run to stop, and a second one ends the process."""
        self._request = request

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self._request is None or self._signal is not None:
            _say("stopped; run the same command again to go on")
            os._exit(128 + number)
        self._signal = number
        _say(f"stopping: {self._finished}; the same signal again ends at once, and loses no row either")
        self._request.interrupt()


@contextmanager
def stop_signals(finished: str = "what is embedded is written") -> Iterator[StopSignals]:
    """Handle SIGINT, SIGTERM and SIGHUP while the block runs, if this is the main thread; ``finished`` is said then."""
    signals = StopSignals(finished)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    previous = {
        number: signal.signal(number, signals.handle)
        for number in _SIGNALS
        # A process started by nohup ignores SIGHUP, and one started in the background by a plain shell SIGINT.
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_on_signals() -> None:
    """Until :func:`stop_signals`, end the process at once, with the same exit codes."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, StopSignals().handle)


def _say(message: str) -> None:
    # Not print: a signal may come inside a write to the same stream, which is not reentrant.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, f"\nmillpond: {message}\n".encode())
