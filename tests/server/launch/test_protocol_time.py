"""HttpProtocol's limits of time, to the second: the event loop's clock is put forward, and nothing sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from millpond.server.launch.protocol import ConnectionCap, HttpProtocol

LIMIT = 65
LOOK = LIMIT / 16  # how often it is seen whether a client reads
POST = b"POST /x HTTP/1.1\r\nHost: pond\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: pond\r\n\r\n"
LARGE = 10_000_000  # more bytes than the buffers of the sockets hold


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until it is put forward."""

    now = 0.0

    def time(self) -> float:
        return self.now

    async def put_forward(self) -> None:
        """By a second."""
        self.now += 1.0
        for _ in range(20):  # what is due, and what that makes ready
            await asyncio.sleep(0)


async def large(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    while message.get("more_body"):
        message = await receive()
    if message["type"] == "http.request":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
        await send({"type": "http.response.body", "body": bytes(LARGE)})


def closed_after(
    sent: bytes, read: Callable[[socket.socket, float], Callable[[], object] | None], *, most: int
) -> float | None:
    """The second in which the server ends the connection of a client that calls ``read`` every second.

    ``read`` returns what has to be called until the server writes on, if it shall.
    """
    clock = Clock()

    async def main() -> float | None:
        config = Config(large, http=HttpProtocol, lifespan="off", log_config=None, timeout_keep_alive=LIMIT)
        config.load()
        state, cap = ServerState(), ConnectionCap(8)
        server = await clock.create_server(lambda: HttpProtocol(config, state, {}, cap=cap), "127.0.0.1", 0)
        server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            client.setblocking(False)
            await clock.sock_connect(client, server.sockets[0].getsockname())
            await clock.sock_sendall(client, sent)
            await clock.put_forward()
            clock.now = 0.0
            assert state.connections
            try:
                for _ in range(most):
                    await clock.put_forward()
                    await until_written(state, read(client, clock.now))
                    if not state.connections:
                        return clock.now
                return None
            finally:
                for connection in state.connections:
                    connection.transport.abort()
                server.close()
                await asyncio.sleep(0)

    try:
        return clock.run_until_complete(main())
    finally:
        clock.close()


async def until_written(state: ServerState, more: Callable[[], object] | None) -> None:
    """Call ``more`` until the server could write again: as long as the system takes, whose time is not the loop's."""
    left = unwritten(state)
    while more is not None and unwritten(state) == left:
        with contextlib.suppress(BlockingIOError):
            more()
        await asyncio.sleep(0)


def unwritten(state: ServerState) -> int:
    """Bytes that the system has not taken yet."""
    return sum(connection.transport.get_write_buffer_size() for connection in state.connections)


def nothing(client: socket.socket, now: float) -> None:
    """A client that only waits."""


def test_a_client_that_reads_nothing_has_its_time_once() -> None:
    closed = closed_after(GET, nothing, most=3 * LIMIT)
    assert closed is not None and LIMIT <= closed <= LIMIT + 2 * LOOK + 1  # the system's buffers took some at first


def test_a_client_that_reads_slowly_is_kept_until_it_stops() -> None:
    def read(client: socket.socket, now: float) -> Callable[[], object] | None:
        return partial(client.recv, 1 << 20) if now % 20 == 0 and now <= 200 else None

    closed = closed_after(GET, read, most=600)
    assert closed is not None and 200 + LIMIT <= closed <= 200 + LIMIT + 2 * LOOK + 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(POST + b"Content-Length: 9\r\n\r\n{", 408, id="half a body"),
        pytest.param(POST, None, id="half a head"),
        pytest.param(b"", None, id="nothing"),
    ],
)
def test_a_silent_client_is_gone_when_its_time_is_over(sent: bytes, status: int | None) -> None:
    """It was told why, and has a second to read it, not its whole time again."""
    received = bytearray()

    def read(client: socket.socket, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            received.extend(client.recv(1 << 16))

    closed = closed_after(sent, read, most=3 * LIMIT)
    assert closed is not None and LIMIT <= closed <= LIMIT + 2
    assert re.findall(rb"^HTTP/1.1 (\d+)", received) == ([b"%d" % status] if status else [])
