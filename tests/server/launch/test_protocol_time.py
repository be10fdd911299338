"""HttpProtocol's limits of time, to the second: the event loop's clock is put forward, and nothing sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from millpond.server.launch.protocol import ConnectionCap, HttpProtocol

LIMIT = 65
LOOK = LIMIT / 16  # how often it is seen whether a client reads
POST = b"POST /x HTTP/1.1\r\nHost: pond\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: pond\r\n\r\n"
LARGE = 30_000_000  # more bytes than the buffers of the sockets hold


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


def closed_after(sent: bytes, read: Callable[[socket.socket, float], None], *, most: int) -> float | None:
    """The second in which the server ends the connection of a client that calls ``read`` every second."""
    clock = Clock()

    async def main() -> float | None:
        config = Config(large, http=HttpProtocol, lifespan="off", log_config=None, timeout_keep_alive=LIMIT)
        config.load()
        state, cap = ServerState(), ConnectionCap(8)
        server = await clock.create_server(lambda: HttpProtocol(config, state, {}, cap=cap), "127.0.0.1", 0)
        with socket.socket() as client:
            client.setblocking(False)
            await clock.sock_connect(client, server.sockets[0].getsockname())
            await clock.sock_sendall(client, sent)
            await clock.put_forward()
            clock.now = 0.0
            assert state.connections
            try:
                for _ in range(most):
                    await clock.put_forward()
                    read(client, clock.now)
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


def nothing(client: socket.socket, now: float) -> None:
    """A client that only waits."""


def test_a_client_that_reads_nothing_has_its_time_once() -> None:
    closed = closed_after(GET, nothing, most=3 * LIMIT)
    assert closed is not None and LIMIT <= closed <= LIMIT + LOOK + 1


def test_a_client_that_reads_slowly_is_kept_until_it_stops() -> None:
    def read(client: socket.socket, now: float) -> None:
        if now % 20 == 0 and now <= 200:
            client.recv(4 << 20)

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
