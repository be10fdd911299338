"""HttpProtocol: uvicorn's HTTP protocol with bounds on what a client may send, and on how long it may take."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from millpond.server.errors import error_response

logger = logging.getLogger(__name__)

# All headers of one request together; keys, ids and traces take a few hundred bytes. Trailers may have as much.
_MAX_HEAD = 1 << 16
# What chunks take beyond their content: sizes, extensions, trailers. A chunk of one byte takes five more.
_MAX_FRAMING = 1 << 16
_FRAMING_PER_BYTE = 8
# What is read and dropped after the last response, so that a client that is still sending can read it: of a body, and
# of anything else, of which it may have sent as much before it could see the response.
_MAX_DROPPED_BODY = 64 << 20
_MAX_DROPPED = 1 << 20
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_METHOD = len(b"  HTTP/1.1\r\n\r\n")  # bytes of a head beside its method, its URL and its headers
_SEPARATORS = len(b": \r\n")
# A client beyond the cap, or one whose time is over, has this long to read the reason.
_LAST_SECONDS = 1.0
# How often a client's time is interrupted to see whether it reads, if it has more than this many bytes to read.
_LOOKS = 16
_SMALL = 1 << 12
_QUIET_SECONDS = 60.0  # between two warnings about the cap
# Java's client offers an upgrade to HTTP/2 with every request. A server may ignore the offer, but the parser takes the
# body after it for the other protocol.
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*(?=\r\n)", re.IGNORECASE)


# Why a message is not taken as a request: the status and the message of the response.
Rejection = tuple[HTTPStatus, str]

_LONG_HEAD: Rejection = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"The headers have more than {_MAX_HEAD} bytes; send fewer",
)
_LONG_TRAILERS: Rejection = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"The trailers have more than {_MAX_HEAD} bytes; leave them out, nobody reads them",
)
_LONG_FRAMING: Rejection = (
    HTTPStatus.BAD_REQUEST,
    f"The chunks of the body have more than {_MAX_FRAMING} bytes around their content; send larger chunks, without "
    "extensions",
)


class ConnectionCap:
    """The most connections of a server."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._warned = -_QUIET_SECONDS

    def exceeded(self, count: int, now: float) -> bool:
        """Whether ``count`` connections are too many; warns once a minute, in seconds of ``now``."""
        if count > self.most and now - self._warned >= _QUIET_SECONDS:
            self._warned = now
            logger.warning(
                "%d connections are open, which is the most (--max-connections, and ulimit -n): new ones get 503",
                self.most,
            )
        return count > self.most


class _ProtocolError(Exception):
    """Stops the parser; ``HttpProtocol._rejection`` says why."""


class _Transport:
    """The transport that uvicorn writes to and closes.

    The head of a response waits for the first part of its body, so that one packet has both; the protocol decides how
    to close.
    """

    def __init__(self, protocol: HttpProtocol, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self._transport = transport
        self._head: bytes | None = None
        self._begun = False  # whether the head of the response has come

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write a head or a part of a body."""
        if self._begun or data == _CONTINUE:
            self._transport.writelines((self._head, data) if self._head else (data,))
            self._head = None
        else:
            self._begun, self._head = True, data

    def end(self) -> None:
        """The response is over, also one that has no body."""
        if self._head:
            self._transport.write(self._head)
        self._begun, self._head = False, None

    def is_closing(self) -> bool:
        """Whether nothing more is answered."""
        return self._protocol.closing or self._transport.is_closing()

    def close(self) -> None:
        """Close, when the client has had its response."""
        self._protocol.close()


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    It is the client's turn while no request is complete, and while responses wait to be read; a client that makes no
    progress for ``timeout_keep_alive`` is given up.
    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], *, cap: ConnectionCap
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.closing = False  # nothing more is answered
        self._cap = cap
        self._unanswered: deque[RequestResponseCycle] = deque()  # requests whose heads are complete
        self._receiving = False  # the body of the latest of them
        self._in_head = False
        self._head_size = 0  # of the headers or the trailers, without whitespace around values
        self._overhead = 0  # bytes of an incomplete head or body that are no content
        self._content = 0  # bytes of the body
        self._in_data = 0  # content in the latest data
        self._ended = False  # a head or a body, in the latest data
        self._keep_alive = False  # after the response, if the request is complete by then
        self._stopping = False  # the server is
        self._rejection: Rejection | None = None
        self._dropped = 0
        self._unsent = 0  # bytes that the client had still to read when they were last counted
        self._since: float | None = None  # when the client's turn began

    # Called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own
        """Called on connect."""
        self._wire = transport
        self._responses = _Transport(self, transport)
        super().connection_made(self._responses)  # type: ignore[arg-type]  # the part that uvicorn uses
        self._since = self.loop.time()
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._check_time)
        if self._cap.exceeded(len(self.connections), self._since):
            message = f"The server has {self._cap.most} connections, which is the most; retry in about 1 s"
            self._reject((HTTPStatus.SERVICE_UNAVAILABLE, message))
            self.loop.call_later(_LAST_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed."""
        super().connection_lost(exc)
        for cycle in self._unanswered:  # uvicorn tells the latest one only
            _abandon(cycle)
        self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Called with each piece of data."""
        if self.closing or self._rejection is not None:
            self._dropped += len(data)
            if self._dropped > (_MAX_DROPPED_BODY if self._receiving else _MAX_DROPPED):
                self._wire.abort()
            return
        size = len(data)
        if not self._receiving and b"pgrade" in data.lower():
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head + end[:2]) + end[2:] + rest
        self._in_data, self._ended = 0, False
        super().data_received(data)
        self._bound_overhead(size)

    def pause_writing(self) -> None:
        """Called when the client does not read its responses as fast as they are written."""
        super().pause_writing()
        self._update_timer()

    def resume_writing(self) -> None:
        """Called when it has read most of them."""
        super().resume_writing()
        self._update_timer()

    # Called by the parser

    def on_message_begin(self) -> None:
        """Called at the start of a head."""
        self._in_head, self._head_size = True, 0
        super().on_message_begin()
        self._update_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called with each header and each trailer; trailers are dropped."""
        self._head_size += len(name) + len(value) + _SEPARATORS
        if self._head_size > _MAX_HEAD:
            self._stop(_LONG_HEAD if self._in_head else _LONG_TRAILERS)
        if self._in_head:
            super().on_header(name, value.strip(b" \t"))
        elif name.lower() == b"connection":  # after close in it the parser takes no other request
            self._keep_alive = False

    def on_headers_complete(self) -> None:
        """Called at the end of a head."""
        self._in_head, self._ended = False, True
        version = self.parser.get_http_version()
        if self._head_size + len(self.parser.get_method()) + len(self.url) + _NO_METHOD > _MAX_HEAD:
            self._stop(_LONG_HEAD)
        if (rejection := _rejection(version, self.headers)) is not None:
            self._stop(rejection)
        self.expect_100_continue &= version != "1.0"  # whose clients do not understand it
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        self._receiving = True
        self._head_size = self._overhead = self._content = 0
        # Until the body is complete, a response closes the connection.
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive and not self._stopping, False

    def on_body(self, body: bytes) -> None:
        """Called with each piece of a body."""
        self._in_data += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called at the end of a request; another may follow."""
        self._receiving, self._ended = False, True
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        """Called for invalid HTTP."""
        self._reject(self._rejection or (HTTPStatus.BAD_REQUEST, msg))

    # Called by the server

    def on_response_complete(self) -> None:
        """Called at the end of a response."""
        self._unanswered.popleft()
        self._responses.end()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # this class has its own timer
        if self._rejection is not None and not self._unanswered and not self.closing:
            self._send_rejection(self._rejection)
        self._update_timer()

    def shutdown(self) -> None:
        """Called when the server stops."""
        self._stopping, self._keep_alive = True, False
        super().shutdown()

    def close(self) -> None:
        """Close; a client that may still be sending can read its response first."""
        if self.closing:
            return
        self.closing = True
        self._responses.end()
        self._begin_time()
        if self._stopping or not (self._receiving or self._rejection):
            return self._wire.close()
        self.flow.resume_reading()
        if self._wire.can_write_eof():
            self._wire.write_eof()

    def _update_timer(self) -> None:
        """Count the client's time from now if it is its turn."""
        if self.closing:  # it counts from then on
            return
        answer_due = len(self._unanswered) > self._receiving
        full = self._receiving and self.flow.read_paused  # the application has not taken what is here
        if self.flow.write_paused or not (answer_due or full):
            self._begin_time()
        else:
            self._since = None

    def _begin_time(self) -> None:
        """Count the client's time from now."""
        self._since, self._unsent = self.loop.time(), self._wire.get_write_buffer_size()
        if self._unsent > _SMALL:
            self._schedule()
        else:  # it is on its way
            self._unsent = 0

    def _check_time(self) -> None:
        """Called when the client's time may be over, and meanwhile to see whether it reads."""
        now, unsent = self.loop.time(), self._wire.get_write_buffer_size()
        if self._since is not None and unsent < self._unsent:
            self._since = now
        self._unsent = unsent
        if self._since is not None and now >= self._since + self.timeout_keep_alive:
            self._since = now
            self._give_up()
        self._schedule()

    def _schedule(self) -> None:
        """Set the timer to the end of the client's time; earlier while the client has bytes to read."""
        limit = self.timeout_keep_alive
        left = limit if self._since is None else self._since + limit - self.loop.time()
        self._timer.cancel()
        self._timer = self.loop.call_later(min(left, limit / _LOOKS) if self._unsent else left, self._check_time)

    def _give_up(self) -> None:
        """The client has made no progress in time."""
        if self._unsent or self.closing:
            self._wire.abort()
        elif self._receiving:
            message = f"No more of the body arrived in {self.timeout_keep_alive} s; send it without a pause"
            self._reject((HTTPStatus.REQUEST_TIMEOUT, message))
            self.loop.call_later(_LAST_SECONDS, self._wire.abort)
        else:
            self.close()

    def _bound_overhead(self, size: int) -> None:
        """Bound what is not complete: a head, or what chunks have around their content."""
        if self._ended:  # only a few bytes of this data belong to what is not complete
            self._overhead = self._content = 0
        else:
            self._content += self._in_data
            self._overhead += size - self._in_data
        if self._receiving:
            if self._ended or self._in_data:
                self._update_timer()
            if self._overhead > _MAX_FRAMING + _FRAMING_PER_BYTE * self._content:
                self._reject(_LONG_FRAMING)
        elif self._overhead > _MAX_HEAD:
            self._reject(_LONG_HEAD)

    def _stop(self, rejection: Rejection) -> None:
        self._rejection = rejection
        raise _ProtocolError

    def _reject(self, rejection: Rejection) -> None:
        """Answer a message that is not a request, after the requests before it, and close."""
        if self.closing:
            return
        self._rejection = rejection
        if self._receiving:
            self._receiving, cycle = False, self._unanswered.pop()
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
            cycle.scope["state"]["rejection"] = rejection
            _abandon(cycle)
            if cycle.response_started:
                return self.close()
        if not self._unanswered:
            self._send_rejection(rejection)

    def _send_rejection(self, rejection: Rejection) -> None:
        status, message = rejection
        headers = {"Connection": "close"}
        if status is HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Retry-After"] = "1"
        response = error_response(status.value, status.phrase, message, headers=headers)
        head = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
        self._wire.write(b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (status, status.phrase.encode(), head, bytes(response.body)))
        self.close()


def _abandon(cycle: RequestResponseCycle) -> None:
    """Let the application give up; what it still answers goes nowhere."""
    cycle.disconnected = True
    cycle.message_event.set()


def _rejection(version: str, headers: Sequence[tuple[bytes, bytes]]) -> Rejection | None:
    """What is wrong with a head by RFC 9112, beyond what the parser refuses; ``None`` if it is that of a request."""
    if version not in ("1.0", "1.1"):
        status = HTTPStatus.BAD_REQUEST if version == "0.9" else HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        return status, f"Unsupported HTTP version {version}; use HTTP/1.1"
    hosts = sum(name == b"host" for name, _ in headers)
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if hosts > 1:
        message = f"The request has {hosts} Host headers; send one"
    elif not hosts and version == "1.1":
        message = "The request has no Host header, which HTTP/1.1 demands; send one"
    elif codings and version == "1.0":
        message = "HTTP/1.0 has no Transfer-Encoding; send a Content-Length"
    elif codings not in ([], [b"chunked"]):
        message = "Transfer-Encoding is other than chunked, which is all that is read here; send it alone"
    else:
        return None
    return HTTPStatus.BAD_REQUEST, message
