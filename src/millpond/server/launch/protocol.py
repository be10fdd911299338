"""HttpProtocol: uvicorn's HTTP parser, with upgrade offers ignored and the size and time of headers limited."""

from __future__ import annotations

import re
from asyncio import TimerHandle, Transport
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millpond.server.errors import error_response

# All headers of one request together; keys, ids and traces take a few hundred bytes.
_MAX_HEAD = 1 << 16
# Java's client offers an upgrade to HTTP/2 with every request. A server may ignore the offer, but the parser takes the
# body after it for the other protocol.
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _between = True  # requests: no head or body is incomplete
    _in_head = False
    _head_ended = False  # in the latest data
    _head_bytes = 0
    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # uvicorn's own annotation
        """Called on connect; a silent client is disconnected after the keep-alive time."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called with each piece of data."""
        if self._between:
            end = data.find(b"\r\n\r\n") + 2
            if b"pgrade" in data[:end].lower():
                data = _UPGRADE.sub(b"", data[:end]) + data[end:]
        no_body, self._head_ended = self._between or self._in_head, False
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        # Of data that is partly a body, only a few bytes belong to this head.
        self._head_bytes = self._head_bytes + len(data) if no_body and not self._head_ended else 0
        if self._head_bytes > _MAX_HEAD:
            message = f"The headers have more than {_MAX_HEAD} bytes; send fewer"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def on_message_begin(self) -> None:
        """Called at the start of a head."""
        self._between, self._in_head = False, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Called at the end of a head."""
        self._in_head, self._head_ended = False, True
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Called at the end of a request; another may follow."""
        self._between = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called for invalid HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        answer = error_response(status.value, status.phrase, message, headers={"Connection": "close"})
        head = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
        self.transport.write(b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (status, status.phrase.encode(), head, bytes(answer.body)))
        self.transport.close()

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else this head follows a request in progress
            self.timeout_keep_alive_handler()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
