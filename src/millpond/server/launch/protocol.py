"""HttpProtocol: uvicorn's HTTP parser with bounds on what a client may send, and on how long it may take."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections import deque
from contextlib import suppress
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from millpond.server.errors import error_response
from millpond.server.launch import heads
from millpond.server.launch.heads import Refusal
from millpond.server.launch.transport import ConnectionTransport, Undelivered, undelivered
from millpond.server.launch.watchdog import Watchdog

# All headers of one request together; keys, ids and traces take a few hundred bytes. Trailers may have as much.
_MAX_HEAD = 1 << 16
# What chunks take beyond their content: sizes, extensions, trailers. A chunk of one byte takes five more.
_MAX_FRAMING = 1 << 16
_FRAMING_PER_BYTE = 8
# What is read and dropped after the last answer, so that a client that is still sending does not lose it: of a body,
# as much as of one that is too large; of anything else, as much as it may have sent before it could see the answer.
_MAX_DROPPED_BODY = 64 << 20
_MAX_DROPPED = 1 << 20
_NO_METHOD = len(b"  HTTP/1.1\r\n\r\n")  # bytes of a head beside its method, its URL and its headers
_SEPARATORS = len(b": \r\n")
# Java's client offers an upgrade to HTTP/2 with every request. A server may ignore the offer, but the parser takes the
# body after it for the other protocol.
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class _RefusedError(Exception):
    """Stops the parser; ``HttpProtocol._refusal`` says why."""


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    It is the client's turn while no request is complete, and while answers wait to be read: then the watchdog counts.
    """

    max_connections: int | None = None  # set on a connection that is one too many

    _in_head = False
    _head_bytes = 0  # as they arrived, of a head that is not complete
    _head_size = 0  # of the headers, without whitespace around values
    _receiving = False  # the body of the latest request, of which the head is complete
    _framing = 0  # bytes of that body that are no content
    _framing_tail = 0  # those since the latest content
    _content = 0
    _content_in_data = 0  # content in the latest data
    _ended_in_data = False  # a head or a body, in the latest data
    _keep_alive = False  # after the answer, if the request is complete by then
    _stopping = False  # the server is
    _refusal: Refusal | None = None
    _dropped: int | None = None  # bytes, from when nothing more is parsed
    _unread: Undelivered | None = None  # of the answers, when the time was last over

    # Called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own annotation
        """Called on connect."""
        self._wire = transport
        outer = ConnectionTransport(transport, close=self._close, resumed=self._settle)
        super().connection_made(outer)
        self._outer = outer
        self._unanswered: deque[RequestResponseCycle] = deque()  # requests whose heads are complete
        self._watchdog = watchdog_of(self.server_state, self.loop, self.timeout_keep_alive)
        self._watchdog.wait(self)
        if self.max_connections is not None:
            message = f"The server has {self.max_connections} connections, which is the most; retry in about 1 s"
            self._refuse(Refusal(status=HTTPStatus.SERVICE_UNAVAILABLE, message=message))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed."""
        super().connection_lost(exc)
        for cycle in self._unanswered:  # uvicorn tells the latest one only
            self._drop(cycle)
        self._watchdog.stop(self)

    def data_received(self, data: bytes) -> None:
        """Called with each piece of data."""
        size = len(data)
        if self._dropped is not None:
            self._dropped += size
            if self._dropped > (_MAX_DROPPED_BODY if self._receiving else _MAX_DROPPED):
                return self._wire.abort()
            if not self._receiving:
                return
        if not self._receiving:
            if not self._in_head:
                data = data.lstrip(b"\r\n")  # empty lines, which the parser would skip too
            end = data.find(b"\r\n\r\n") + 2
            if end > 1:
                if self._head_bytes + size - len(data) + end + 2 > _MAX_HEAD:
                    return self._refuse(_LONG_HEAD)
                if b"pgrade" in data[:end].lower():
                    data = _UPGRADE.sub(b"", data[:end]) + data[end:]
        self._content_in_data, self._ended_in_data = 0, False
        super().data_received(data)
        if self._receiving or self._dropped is None:
            self._count(size)

    def pause_writing(self) -> None:
        """Called when the client does not read its answers as fast as they are written."""
        super().pause_writing()
        self._settle()

    def resume_writing(self) -> None:
        """Called when it has read most of them."""
        super().resume_writing()
        self._settle()

    # Called by the parser

    def on_message_begin(self) -> None:
        """Called at the start of a head."""
        self._in_head, self._head_size = True, 0
        super().on_message_begin()
        self._settle()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called with each header and each trailer; trailers are dropped."""
        self._head_size += len(name) + len(value) + _SEPARATORS
        if self._head_size > _MAX_HEAD:
            self._stop(_LONG_HEAD if self._in_head else _LONG_TRAILERS)
        name = name.lower()
        if not self._in_head:
            if name == b"connection":  # after close in it the parser takes no other request
                self._keep_alive = False
            return
        value = value.strip(b" \t")
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called at the end of a head."""
        self._in_head, self._ended_in_data = False, True
        if self._outer.closing:  # no further request is taken
            return
        version = self.parser.get_http_version()
        if self._head_size + len(self.parser.get_method()) + len(self.url) + _NO_METHOD > _MAX_HEAD:
            self._stop(_LONG_HEAD)
        refusal = heads.refusal(version, self.headers)
        if refusal is not None:
            self._stop(refusal)
        if version == "1.0":
            self.expect_100_continue = False  # which a client of 1.0 does not understand
        super().on_headers_complete()
        self._receiving = True
        self._unanswered.append(self.cycle)
        self._head_size = self._framing = self._framing_tail = self._content = 0
        # Until the body is complete, an answer closes the connection.
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive and not self._stopping, False

    def on_body(self, body: bytes) -> None:
        """Called with each piece of a body."""
        self._content_in_data += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called at the end of a request; another may follow."""
        self._receiving, self._ended_in_data = False, True
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()
        if self._outer.closing:  # the body has come to its end, behind its answer
            self._wire.close()
        self._settle()

    def send_400_response(self, msg: str) -> None:
        """Called for invalid HTTP."""
        self._refuse(self._refusal or Refusal(status=HTTPStatus.BAD_REQUEST, message=msg))

    # Called by the server

    def on_response_complete(self) -> None:
        """Called at the end of an answer."""
        self._unanswered.popleft()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the watchdog counts instead of uvicorn's timer
        if self._refusal is not None and not self._unanswered and not self.transport.is_closing():
            self._send_refusal(self._refusal)
        self._settle()

    def shutdown(self) -> None:
        """Called when the server stops."""
        self._stopping, self._keep_alive = True, False
        super().shutdown()

    def give_up(self) -> None:
        """Called by the watchdog when the client has made no progress in time."""
        unread = undelivered(self._wire)
        if unread.size and unread != self._unread:  # it does read, slowly
            self._unread = unread
            self._watchdog.wait(self)
        elif unread.size or self.transport.is_closing():
            self._wire.abort()
        elif self._receiving:
            seconds = self.timeout_keep_alive
            message = f"No more of the body arrived in {seconds} s; send it without a pause"
            self._refuse(Refusal(status=HTTPStatus.REQUEST_TIMEOUT, message=message))
        else:
            self._close()

    def abort(self) -> None:
        """Called by the watchdog when another connection needs the place."""
        self.connections.discard(self)  # at once: it is counted
        self._wire.abort()

    def _settle(self) -> None:
        """Let the watchdog count from now if it is the client's turn."""
        if self._outer.closing:  # it counts from then on
            return
        answer_due = len(self._unanswered) > self._receiving
        full = self._receiving and self.flow.read_paused  # the application has not taken what is here
        if self.flow.write_paused or not (answer_due or full):
            self._watchdog.wait(self)
        else:
            self._watchdog.stop(self)

    def _count(self, size: int) -> None:
        """Bound what is not complete: a head, or what chunks have around their content."""
        if not self._receiving:
            # Of data with the end of another request, only a few bytes belong to this head.
            self._head_bytes = 0 if self._ended_in_data else self._head_bytes + size
            if self._head_bytes > _MAX_HEAD:
                self._refuse(_LONG_HEAD)
            return
        self._head_bytes = 0
        if self._ended_in_data or self._content_in_data:
            self._settle()
        if self._ended_in_data:  # nor to this body
            return
        self._content += self._content_in_data
        self._framing += size - self._content_in_data
        self._framing_tail = 0 if self._content_in_data else self._framing_tail + size
        if self._framing_tail > _MAX_FRAMING or self._framing > _MAX_FRAMING + _FRAMING_PER_BYTE * self._content:
            self._refuse(_LONG_FRAMING)

    def _stop(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise _RefusedError

    def _refuse(self, refusal: Refusal) -> None:
        """Answer a message that is no request, after the requests before it, and close."""
        if self._outer.closing:
            return self._wire.abort()
        self._refusal, self._dropped = refusal, 0
        if self._receiving:
            self._receiving = False
            self._unanswered.pop()
            if self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()
            self.cycle.scope["state"]["refusal"] = (refusal.status.value, refusal.status.phrase, refusal.message)
            self._drop(self.cycle)
            if self.cycle.response_started:
                return self._close()
        if not self._unanswered:
            self._send_refusal(refusal)

    def _drop(self, cycle: RequestResponseCycle) -> None:
        """Let the application give up; what it still answers goes nowhere."""
        cycle.disconnected = True
        cycle.message_event.set()

    def _send_refusal(self, refusal: Refusal) -> None:
        headers = {"Connection": "close"}
        if refusal.status is HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Retry-After"] = "1"
        answer = error_response(refusal.status.value, refusal.status.phrase, refusal.message, headers=headers)
        head = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
        status_line = b"HTTP/1.1 %d %b\r\n" % (refusal.status, refusal.status.phrase.encode())
        self.transport.write(b"%b%b\r\n%b" % (status_line, head, bytes(answer.body)))
        self._close()

    def _close(self) -> None:
        """Close; while the client may still be sending, only what is written, so that it can read its answer."""
        if self._wire.is_closing():
            if self._stopping:
                self._expect_nothing()
            return
        lingers = (self._receiving or self._refusal is not None) and not (self._outer.closing or self._stopping)
        self._outer.closing = True
        if lingers:
            self._dropped = self._dropped or 0
            self.flow.resume_reading()
            if self._wire.can_write_eof():
                self._wire.write_eof()
        else:
            self._wire.close()
            if self._stopping:
                self._expect_nothing()
        self._watchdog.wait(self)

    def _expect_nothing(self) -> None:
        """Close TLS without the client's own alert, which an idle client sends only with its next request.

        What is written, the server's alert included, still arrives.
        """
        if self.scheme != "https":
            return
        connection = self._wire.get_extra_info("socket")
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(socket.SHUT_RD)


def watchdog_of(state: ServerState, loop: asyncio.AbstractEventLoop, seconds: float) -> Watchdog:
    """The watchdog of all connections of a server."""
    watchdog: Watchdog | None = vars(state).get("watchdog")
    if watchdog is None:
        watchdog = vars(state)["watchdog"] = Watchdog(loop, seconds)
    return watchdog


_LONG_HEAD = Refusal(
    status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    message=f"The headers have more than {_MAX_HEAD} bytes; send fewer",
)
_LONG_TRAILERS = Refusal(
    status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    message=f"The trailers have more than {_MAX_HEAD} bytes; leave them out, nobody reads them",
)
_LONG_FRAMING = Refusal(
    status=HTTPStatus.BAD_REQUEST,
    message=(
        f"The chunks of the body have more than {_MAX_FRAMING} bytes around their content; "
        "send larger chunks, without extensions"
    ),
)
