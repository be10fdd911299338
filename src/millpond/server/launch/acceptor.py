"""Acceptor: takes the connections of all sockets of a server, no more of them than it may have."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from millpond.server.launch.protocol import HttpProtocol
from millpond.server.launch.watchdog import Watchdog

logger = logging.getLogger(__name__)

# Files and sockets that the server opens beside its connections: caches, traces, temporary files.
_OTHER_FILES = 64
# More than one process can make use of; each may hold some 100 KB of a request that is not complete.
_MAX_DEFAULT = 16384
_BACKLOG = 2048
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
# The client has closed the connection before it was accepted.
_CLIENT_GONE = (errno.ECONNABORTED, errno.ECONNRESET, errno.EPROTO)
_RETRY_SECONDS = 0.05
# Closing TLS includes sending what is written: the watchdog ends it when the client no longer reads.
_SHUTDOWN_SECONDS = 86400.0
_QUIET_SECONDS = 60.0  # a shortage is over, and logged anew, when it was not seen for so long


class _Handshake:
    """A connection that is not open yet, since its client has to begin TLS.

    Args:
        connection: The accepted socket.
        counted: The handshakes that count as connections.
    """

    def __init__(self, connection: socket.socket, counted: set[_Handshake]) -> None:
        self._connection = connection
        self._counted = counted
        counted.add(self)

    def give_up(self) -> None:
        """Called by the watchdog."""
        self.abort()

    def abort(self) -> None:
        """End the handshake, which closes the connection."""
        self._counted.discard(self)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


class Acceptor:
    """What uvicorn calls a server: it listens from construction on, until it is closed.

    At ``max_connections`` the connection that has waited longest for its client is closed for a new one. If all have
    requests under way, the new one is answered with 503.

    Args:
        sockets: Bound sockets.
        connect: Makes the protocol of a connection.
        watchdog: The server's.
        count: The number of open connections.
        max_connections: The most of them.
        context: For TLS.
        handshake_seconds: How long a TLS handshake may take.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        *,
        connect: Callable[[], HttpProtocol],
        watchdog: Watchdog,
        count: Callable[[], int],
        max_connections: int,
        context: ssl.SSLContext | None,
        handshake_seconds: float,
    ) -> None:
        self.sockets = tuple(sockets)
        self._connect = connect
        self._watchdog = watchdog
        self._count = count
        self._max = max_connections
        self._tls: dict[str, Any] = (
            {}
            if context is None
            else {
                "ssl": context,
                "ssl_handshake_timeout": handshake_seconds,
                "ssl_shutdown_timeout": _SHUTDOWN_SECONDS,
            }
        )
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[_Handshake] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False
        self._shortages: dict[str, float] = {}  # when each was last seen
        for listener in sockets:
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        self._tasks = [self._loop.create_task(self._accept(listener)) for listener in sockets]

    def close(self) -> None:
        """Accept no more connections; one that is being opened is opened, and then told of the end."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for handshake in tuple(self._handshakes):
            handshake.abort()

    async def wait_closed(self) -> None:
        """Wait until none is being accepted."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except OSError as error:
                if error.errno not in _CLIENT_GONE:
                    self._make_room(error)
                    await asyncio.sleep(_RETRY_SECONDS)
                continue
            protocol = self._admit()
            # In a task: if close() cancelled it, the connection would stay open and never be told of the end.
            if not self._tls:
                await asyncio.shield(self._begin(self._open(connection, protocol)))
                continue
            handshake = _Handshake(connection, self._handshakes)
            self._watchdog.wait(handshake)
            self._begin(self._shake(connection, protocol, handshake))
            await asyncio.sleep(0)  # let it begin, and requests run between the connections of a burst

    def _begin(self, opening: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return task

    def _make_room(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        if error.errno in _NO_DESCRIPTOR:
            self._warn(
                "descriptors",
                f"no new connection can be accepted ({reason}) with {self._count()} open; raise the limit of open "
                "files (ulimit -n, LimitNOFILE= of systemd, --ulimit nofile= of docker), or lower --max-connections; "
                "until then idle connections are closed for new ones",
            )
            self._watchdog.abort_longest()
        else:
            self._warn("other", f"no new connection can be accepted ({reason}); trying again")

    def _admit(self) -> HttpProtocol:
        """The protocol of a new connection, for which another one may have to be closed."""
        protocol = self._connect()
        if self._full():
            while self._full() and self._watchdog.abort_longest():
                pass
            full = self._full()
            self._warn(
                "full" if full else "connections",
                f"{self._max} connections are open, which is the most (--max-connections, and ulimit -n): "
                + ("a new one is answered 503" if full else "for a new one, the one that waited longest is closed"),
            )
            if full:
                protocol.max_connections = self._max
        return protocol

    async def _open(self, connection: socket.socket, protocol: HttpProtocol) -> None:
        with suppress(OSError):  # the client is gone, or does not speak TLS
            await self._loop.connect_accepted_socket(lambda: protocol, connection, **self._tls)
            if self._closed:
                protocol.shutdown()

    async def _shake(self, connection: socket.socket, protocol: HttpProtocol, handshake: _Handshake) -> None:
        try:
            await self._open(connection, protocol)
        finally:
            self._handshakes.discard(handshake)
            self._watchdog.stop(handshake)

    def _full(self) -> bool:
        return self._count() + len(self._handshakes) >= self._max

    def _warn(self, kind: str, message: str) -> None:
        """A warning, once for as long as it stays the same."""
        now = self._loop.time()
        if now - self._shortages.get(kind, -_QUIET_SECONDS) >= _QUIET_SECONDS:
            logger.warning("%s", message)
        self._shortages[kind] = now


def allowed_connections(asked: int | None) -> int:
    """The most connections that the limit of open files leaves room for, and of these at most ``asked``.

    Args:
        asked: By default as many as possible, up to 16,384.
    """
    room = _descriptors()
    if asked is None:
        return min(room, _MAX_DEFAULT)
    if asked > room:
        logger.warning(
            "--max-connections=%d is more than the limit of open files leaves room for (%d); raise it with ulimit -n",
            asked,
            room,
        )
    return min(room, asked)


def _descriptors() -> int:
    """How many files this process may still open, less those that it needs itself."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        opened = len(os.listdir("/dev/fd"))
    except OSError:
        opened = _OTHER_FILES
    return max(1, limit - opened - min(_OTHER_FILES, limit // 4))
