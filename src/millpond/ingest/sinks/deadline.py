"""A deadline over a whole request, for clients that wait for a server without one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def hang_up_after(seconds: float | None, fileno: Callable[[], int]) -> Iterator[threading.Event]:
    """Shut a connection down after so many seconds, whatever its server does, also if it sends a byte now and then.

    The client then meets the end of the connection, which it reports as an error of its own. When the block is left,
    the connection is shut down or never will be: nothing happens to a later request, nor to another file that has got
    the number of the descriptor.

    Args:
        seconds: The time; ``None`` for no limit.
        fileno: Returns the descriptor of the connection's socket; may raise, if it is closed.

    Yields:
        An event that is set when the time is over.
    """
    late, over, turn = threading.Event(), threading.Event(), threading.Lock()

    def hang_up() -> None:
        with turn, suppress(Exception):  # closed meanwhile
            if over.is_set():
                return
            late.set()
            line = socket.socket(fileno=fileno())
            try:
                line.shutdown(socket.SHUT_RDWR)
            finally:
                line.detach()  # the client closes it

    timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        with turn:
            over.set()
