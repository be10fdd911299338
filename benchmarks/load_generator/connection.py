"""Connections: HTTP/1.1 over persistent sockets, with as little overhead as Python allows.

The generator shares its machine with the server, so its CPU time is missing there. A request with an answer of 150 kB
costs 28 us of CPU time here, 100 us with aiohttp and 700 us with httpx.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import NamedTuple, Self

from load_generator.target import Target
from millpond.errors import MissingExtraError

try:
    import httptools
except ImportError as error:
    raise MissingExtraError("the load generator needs httptools: pip install 'millpond[server]'") from error


class Answer(NamedTuple):
    """The response to a request."""

    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """One socket, with one request at a time.

    Args:
        timeout: Seconds to wait for an answer.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.open = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._parts: list[bytes] = []
        self._answer: asyncio.Future[Answer] | None = None

    async def send(self, message: bytes) -> Answer:
        """Send a request and wait for its answer.

        Raises:
            TimeoutError: The answer took too long; the connection cannot be used again.
            OSError: The connection was lost, or the answer is not HTTP.
        """
        assert self._transport is not None and self._answer is None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._answer = answer
        self._parser, self._parts = httptools.HttpResponseParser(self), []
        limit = loop.call_later(self._timeout, self._fail, TimeoutError(f"no answer within {self._timeout:g} s"))
        self._transport.write(message)
        try:
            return await answer
        finally:
            limit.cancel()
            self._answer = None
            if not answer.done() or answer.cancelled():
                self.close()  # a late answer would be taken for the next request's

    def close(self) -> None:
        """Drop the connection at once."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio: connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio: the connection is closed."""
        self.open = False
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with each piece of data."""
        if self._parser is None or self._answer is None:
            self.close()  # data without a request
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(OSError(f"what the server sent is not HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        """Called by the parser with each part of the body."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the answer."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:  # informational: the final answer follows
            self._parts = []
            return
        if not self._parser.should_keep_alive():
            self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Answer(status, b"".join(self._parts)))

    def _fail(self, error: OSError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            self.close()


class Connections:
    """A pool of at most ``limit`` connections to a target, opened when needed and kept open.

    Args:
        target: The endpoint.
        limit: Most connections at once; further requests wait for a free one.
        timeout: Seconds after which a request, or opening a connection, is given up.
    """

    def __init__(self, target: Target, *, limit: int, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._tls = target.tls()
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # asyncio closes sockets in its next iteration

    async def send(self, message: bytes) -> Answer:
        """Send a request over the next free connection and wait for its answer.

        Raises:
            TimeoutError: The answer or the connection took too long.
            OSError: No connection could be opened, it was lost, or the answer is not HTTP.
        """
        async with self._slots:
            connection = await self._next()
            try:
                return await connection.send(message)
            finally:
                if connection.open:
                    self._idle.append(connection)

    async def _next(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:  # the server may have closed it meanwhile
                return connection
        async with asyncio.timeout(self._timeout):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._timeout), self._target.host, self._target.port, ssl=self._tls
            )
        return connection
