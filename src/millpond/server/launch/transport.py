"""ConnectionTransport: the transport that uvicorn sees, whose closing goes through the protocol; undelivered bytes."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

# Where Linux's struct tcp_info has the bytes that the client has acknowledged since it connected.
_BYTES_ACKED = 120


class ConnectionTransport(asyncio.Transport):
    """Writes to another transport; the protocol decides how it is closed.

    Args:
        transport: The event loop's transport.
        close: Called instead of its ``close``.
        resumed: Called after reading was resumed.
    """

    def __init__(self, transport: asyncio.Transport, *, close: Callable[[], None], resumed: Callable[[], None]) -> None:
        super().__init__()
        self.closing = False  # set by the protocol as soon as nothing more is answered
        self._transport = transport
        self._resumed = resumed
        # Bound once: an answer is written without a further call.
        self.write = transport.write  # type: ignore[method-assign]
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.close = close  # type: ignore[method-assign]

    def is_closing(self) -> bool:
        """Whether nothing more is answered."""
        return self.closing or self._transport.is_closing()

    def pause_reading(self) -> None:
        """Let the client wait."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._transport.resume_reading()
        self._resumed()

    def set_protocol(self, protocol: Any) -> None:
        """Hand the connection to another protocol."""
        self._transport.set_protocol(protocol)


class Undelivered(NamedTuple):
    """What a client has still to receive; another value later shows that it is reading."""

    size: int  # bytes in the transport and the socket
    acknowledged: int = 0  # bytes that it has received so far


def undelivered(transport: asyncio.Transport) -> Undelivered:
    """What has been written to ``transport`` and not been received.

    A transport of TLS counts only what it has not encrypted yet: the rest is found in the socket (on Linux).
    """
    size = transport.get_write_buffer_size()
    if transport.get_extra_info("ssl_object") is not None:
        with suppress(OSError, ImportError, AttributeError):
            return _in_socket(transport.get_extra_info("socket").fileno(), size)
    return Undelivered(size)


def _in_socket(descriptor: int, size: int) -> Undelivered:
    import fcntl  # not on Windows
    import termios

    queued = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    return Undelivered(size + queued, struct.unpack_from("Q", info, _BYTES_ACKED)[0])
