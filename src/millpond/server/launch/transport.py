"""ConnectionTransport: the transport that uvicorn sees, whose closing and reading go through the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


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
