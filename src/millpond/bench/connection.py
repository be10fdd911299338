"""Connections: HTTP/1.1 over sockets that stay open, as cheap as Python has it.

The generator shares its machine with the server, so what a request costs it is taken from the server. A request and its
answer of 150 kB cost 28 us of processor time here, 100 us with aiohttp and 700 us with httpx.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import NamedTuple, Self

from millpond.bench.target import Target
from millpond.errors import MissingExtraError

try:
    import httptools
except ImportError as error:
    raise MissingExtraError("the load generator needs httptools: pip install 'millpond[server]'") from error


class Answer(NamedTuple):
    """What a request was answered."""

    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """One socket; it carries one request at a time.

    Args:
        timeout: Seconds that an answer may take.
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
            TimeoutError: It did not come in time; the connection is of no more use.
            OSError: The connection was lost, or what came is not HTTP.
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
                self.close()  # what comes now would be taken for the next request's answer

    def close(self) -> None:
        """Drop the connection at once."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's: the socket is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: the socket is gone."""
        self.open = False
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        """asyncio's: bytes came."""
        if self._parser is None or self._answer is None:
            self.close()  # an answer to nothing
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(OSError(f"what the server sent is not HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        """The parser's: a part of the answer's body."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """The parser's: the answer is whole."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:  # informational: the answer is still to come
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
    """At most ``limit`` connections to a target, opened as they are needed and kept.

    Args:
        target: Where to.
        limit: Most of them at once; a request that finds none free waits for one.
        timeout: Seconds until a request, or the opening of a connection, is given up.
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
        await asyncio.sleep(0)  # asyncio closes sockets in its next turn

    async def send(self, message: bytes) -> Answer:
        """Send a request over the next free connection and wait for its answer.

        Raises:
            TimeoutError: It, or the connection, did not come in time.
            OSError: There is no connection to be had, it was lost, or what came is not HTTP.
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
            if connection.open:  # the server may have closed it since
                return connection
        async with asyncio.timeout(self._timeout):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._timeout), self._target.host, self._target.port, ssl=self._tls
            )
        return connection
