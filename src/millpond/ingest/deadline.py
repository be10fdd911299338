"""A deadline over a whole request, for clients that wait for a server without one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def hang_up_after(seconds: float | None, fileno: Callable[[], int]) -> Iterator[threading.Event]:
    """Shut a connection down after so many seconds, whatever its server does, also if it sends a byte now and then.

    The client then meets the end of the connection, which it reports as an error of its own.

    Args:
        seconds: The time; ``None`` for no limit.
        fileno: Returns the descriptor of the connection's socket; may raise, if it is closed.

    Yields:
        An event that is set when the time is over.
    """
    late = threading.Event()

    def hang_up() -> None:
        late.set()
        with suppress(Exception):  # closed meanwhile
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
