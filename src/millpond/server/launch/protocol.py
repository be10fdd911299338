"""Wire: HTTP as uvicorn reads it, but for offers of other protocols, and for heads without an end."""

from __future__ import annotations

import re
from asyncio import TimerHandle, Transport
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millpond.server.errors import error_response

# All headers of one request together; keys, ids and traces take some hundred bytes.
_LONGEST_HEAD = 1 << 16
# Java's client offers HTTP/2 with every request that it sends. Whoever does not take the offer goes on as if there were
# none, but the parser takes the body behind it for the other protocol.
_OFFER = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class Wire(HttpToolsProtocol):
    """One connection."""

    _between = True  # requests: neither a body nor a head has begun that has not ended
    _in_head = False
    _head_ended = False  # in what came last
    _head_bytes = 0
    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Somebody connected; who says nothing is not waited for longer than between two requests."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        if self._between:
            end = data.find(b"\r\n\r\n") + 2
            if b"pgrade" in data[:end].lower():
                data = _OFFER.sub(b"", data[:end]) + data[end:]
        bodiless, self._head_ended = self._between or self._in_head, False
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        # Of bytes that are partly a body's few are this head's.
        self._head_bytes = self._head_bytes + len(data) if bodiless and not self._head_ended else 0
        if self._head_bytes > _LONGEST_HEAD:
            told = f"The headers have more than {_LONGEST_HEAD} bytes; send fewer"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, told)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def on_message_begin(self) -> None:
        """A head begins."""
        self._between, self._in_head = False, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head came to its end."""
        self._in_head, self._head_ended = False, True
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request came to its end, and another may follow."""
        self._between = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        answer = error_response(status.value, status.phrase, message, headers={"Connection": "close"})
        head = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
        self.transport.write(b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (status, status.phrase.encode(), head, bytes(answer.body)))
        self.transport.close()

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else this is the head of another request
            self.timeout_keep_alive_handler()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
