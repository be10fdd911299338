"""Acceptor: a server at its number of connections, or at the system's number of open files, still answers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.server.conftest import address_of, serving
from tests.server.launch.conftest import Certify

from millpond.server.app import create_app
from millpond.server.launch import acceptor
from millpond.server.launch.acceptor import allowed_connections
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig

GET = b"GET /health HTTP/1.1\r\nHost: pond\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: pond\r\nConnection: close\r\n\r\n"
SECONDS = 30
# What a client can do to keep a connection without a request.
HELD = {
    "nothing": [],
    "an empty line": [b"\r\n"],
    "a request, and an empty line": [GET, b"\r\n"],
    "a byte of a refused body": [b"POST /embed HTTP/1.1\r\nHost: pond\r\nContent-Length: 99\r\n\r\n", b"x"],
    "a begun trailer": [b"POST /embed HTTP/1.1\r\nHost: pond\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"A: "],
    "half a body": [
        b"POST /embed HTTP/1.1\r\nHost: pond\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99\r\n\r\n",
        b"x",
    ],
}


@pytest.fixture
def models(embedder: Path) -> ServedModels:
    """Closed by the server's end."""
    return ServedModels.load([ModelConfig(model=str(embedder), names=("pond",))])


def connect(address: str) -> socket.socket:
    split = urlsplit(address)
    return socket.create_connection((str(split.hostname), int(split.port or 0)), timeout=SECONDS)


def reply_of(connection: socket.socket, sent: bytes = LAST) -> bytes:
    connection.sendall(sent)
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def is_closed(connection: socket.socket) -> bool:
    """Waits until the server has closed it, or for half a second."""
    connection.settimeout(0.5)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("held", HELD.values(), ids=HELD.keys())
def test_the_connection_that_waited_longest_makes_room(
    models: ServedModels, held: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(max_connections=4, api_keys=("key",))
    with serving(create_app(models, config), config) as server, ExitStack() as stack:
        waiting = []
        for _ in range(12):
            connection = stack.enter_context(connect(address_of(server)))
            for part in held:
                connection.sendall(part)
                time.sleep(0.01)
            waiting.append(connection)
        for _ in range(3):
            with connect(address_of(server)) as connection:
                assert reply_of(connection).startswith(b"HTTP/1.1 200 ")
        assert [is_closed(connection) for connection in waiting[:9]] == [True] * 9
        assert len(server.server_state.connections) == 3  # the latest: eight made room for another, one for the GETs
    warnings = [record.getMessage() for record in caplog.records if "--max-connections" in record.getMessage()]
    assert len(warnings) == 1  # of all of them
    assert "4 connections are open" in warnings[0]


def test_requests_under_way_are_not_closed_and_a_new_one_is_told_to_come_back(models: ServedModels) -> None:
    config = ServerConfig(max_connections=2)
    app = create_app(models, config)
    loop: asyncio.AbstractEventLoop | None = None
    go: asyncio.Event | None = None

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal loop, go
        if scope["type"] == "http":
            loop, go = asyncio.get_running_loop(), go or asyncio.Event()
            await go.wait()
        await app(scope, receive, send)

    slow.state = app.state  # type: ignore[attr-defined]
    with serving(slow, config) as server, ExitStack() as stack:  # type: ignore[arg-type]
        busy = [stack.enter_context(connect(address_of(server))) for _ in range(2)]
        for connection in busy:
            connection.sendall(LAST)
        time.sleep(0.3)
        for _ in range(3):
            with connect(address_of(server)) as connection:
                head, _, body = reply_of(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in head.lower() and b"connection: close" in head.lower()
            assert b"2 connections" in body
        assert loop is not None and go is not None
        loop.call_soon_threadsafe(go.set)
        for connection in busy:
            assert b"".join(iter(lambda: connection.recv(1 << 16), b"")).startswith(b"HTTP/1.1 200 ")  # noqa: B023


def test_a_unix_socket_has_the_same_bound(models: ServedModels, tmp_path: Path) -> None:
    config = ServerConfig(max_connections=2, uds=tmp_path / "socket")

    def connect_file() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(SECONDS)
        connection.connect(str(config.uds))
        return connection

    with serving(create_app(models, config), config), ExitStack() as stack:
        held = [stack.enter_context(connect_file()) for _ in range(5)]
        with connect_file() as connection:
            assert reply_of(connection).startswith(b"HTTP/1.1 200 ")
        assert all(is_closed(connection) for connection in held[:4])


@pytest.mark.parametrize("greeting", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n"], ids=["silent", "half", "no TLS"])
def test_handshakes_count_and_make_room(models: ServedModels, certify: Certify, greeting: bytes) -> None:
    certificate, key = certify("server")
    config = ServerConfig(max_connections=3, ssl_certfile=certificate, ssl_keyfile=key)
    context = ssl.create_default_context(cafile=certificate)
    with serving(create_app(models, config), config) as server, ExitStack() as stack:
        held = [stack.enter_context(connect(address_of(server))) for _ in range(9)]
        for connection in held:
            with contextlib.suppress(OSError):
                connection.sendall(greeting)
        for _ in range(2):
            with context.wrap_socket(connect(address_of(server)), server_hostname="127.0.0.1") as connection:
                assert reply_of(connection).startswith(b"HTTP/1.1 200 ")
        assert all(is_closed(connection) for connection in held[:6])


def test_a_handshake_has_the_time_of_a_connection(models: ServedModels, certify: Certify) -> None:
    certificate, key = certify("server")
    config = ServerConfig(ssl_certfile=certificate, ssl_keyfile=key)
    with serving(create_app(models, config), config, keep_alive=1) as server:
        with connect(address_of(server)) as connection:
            assert connection.recv(1) == b""
        context = ssl.create_default_context(cafile=certificate)
        with context.wrap_socket(connect(address_of(server)), server_hostname="127.0.0.1") as idle:
            assert idle.recv(1) == b""
        message = b"POST /none HTTP/1.1\r\nHost: pond\r\nContent-Length: 9\r\n\r\n"
        with context.wrap_socket(connect(address_of(server)), server_hostname="127.0.0.1") as early:
            assert reply_of(early, message).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("request_", [GET, LAST], ids=["idle", "told to close"])
def test_an_idle_client_of_tls_does_not_hold_up_the_end(
    models: ServedModels, certify: Certify, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = certify("server")
    config = ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, drain_timeout=5)
    context = ssl.create_default_context(cafile=certificate)
    with ExitStack() as stack:
        with serving(create_app(models, config), config) as server:
            idle = context.wrap_socket(
                stack.enter_context(connect(address_of(server))),
                server_hostname="127.0.0.1",
                suppress_ragged_eofs=False,  # the end without the server's alert would be an error
            )
            stack.enter_context(idle)
            idle.sendall(request_)
            answer = b""
            while not answer.endswith(b"}"):
                answer += idle.recv(1 << 16)
        assert idle.recv(1 << 16) == b""  # it has not been closed, nor has it read the alert, until here
    assert "graceful shutdown exceeded" not in caplog.text


@pytest.fixture
def large_answers(models: ServedModels, certify: Certify) -> Iterator[Callable[[], ssl.SSLSocket]]:
    """Makes TLS connections to a server that answers with 12 MB, and whose connections may wait for a second."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"12000000")]})
            await send({"type": "http.response.body", "body": bytes(12_000_000)})
        else:
            await application(scope, receive, send)

    application = create_app(models)
    app.state = application.state  # type: ignore[attr-defined]
    certificate, key = certify("server")
    config = ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, drain_timeout=5)
    context = ssl.create_default_context(cafile=certificate)
    with serving(app, config, keep_alive=1) as server, ExitStack() as stack:  # type: ignore[arg-type]
        split = urlsplit(address_of(server))

        def connect() -> ssl.SSLSocket:
            plain = stack.enter_context(socket.socket())
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            plain.settimeout(SECONDS)
            plain.connect((split.hostname, split.port))
            return stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))

        yield connect


@pytest.mark.slow
@pytest.mark.parametrize("request_", [GET, LAST])
def test_a_slow_reader_over_tls_gets_its_whole_answer(
    large_answers: Callable[[], ssl.SSLSocket], request_: bytes
) -> None:
    connection = large_answers()
    connection.sendall(request_)
    received = pauses = 0
    while received < 12_000_000:
        piece = connection.recv(1 << 16)
        assert piece, f"closed after {received} bytes"
        received += len(piece)
        if received >> 20 > pauses:
            pauses += 1
            time.sleep(0.5)  # 6 s in all


@pytest.mark.slow
def test_an_answer_over_tls_that_nobody_reads_does_not_hold_its_connection(
    large_answers: Callable[[], ssl.SSLSocket],
) -> None:
    connection = large_answers()
    connection.sendall(GET)
    time.sleep(5)
    received = 0
    try:
        while piece := connection.recv(1 << 20):
            received += len(piece)
    except OSError:  # the end without the server's alert
        pass
    assert received < 12_000_000


# --- The system's limit ---------------------------------------------------------------------------------------------

Start = Callable[..., tuple[subprocess.Popen[bytes], str, Path]]


@pytest.fixture
def start(embedder: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts ``millpond serve`` with a limit of open files; returns its process, its address and its log."""
    with ExitStack() as stack:

        def start(limit: int, *words: str) -> tuple[subprocess.Popen[bytes], str, Path]:
            log = tmp_path / "log"
            serve = [sys.executable, "-m", "millpond", "serve", str(embedder), "--port", "0", *words]
            process = subprocess.Popen(
                ["sh", "-c", 'ulimit -n "$0"; exec "$@"', str(limit), *serve],
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("wb")),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            printed = process.stdout.readline().decode()
            assert printed.startswith("serving at "), log.read_text()
            return process, printed.split()[2], log

        yield start


def test_held_connections_do_not_use_up_the_open_files(start: Start) -> None:
    _, address, log = start(150, "--api-key", "key")
    with ExitStack() as stack:
        for parts in HELD.values():
            for _ in range(60):
                connection = stack.enter_context(connect(address))
                with contextlib.suppress(OSError):
                    for part in parts:
                        connection.sendall(part)
        with connect(address) as connection:
            assert reply_of(connection).startswith(b"HTTP/1.1 200 ")
    (line,) = [line for line in log.read_text().splitlines() if "--max-connections" in line]
    count = re.search(r"(\d+) connections are open", line)
    assert count is not None and 20 < int(count[1]) < 150


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limit of another process")
def test_a_server_without_descriptors_says_so_once_and_goes_on(start: Start) -> None:
    process, address, log = start(300)
    opened = len(os.listdir(f"/proc/{process.pid}/fd"))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (opened + 3, 300))  # other files may take them, too
    with ExitStack() as stack:
        held = [stack.enter_context(connect(address)) for _ in range(12)]
        with connect(address) as connection:
            assert reply_of(connection).startswith(b"HTTP/1.1 200 ")
        assert any(is_closed(connection) for connection in held)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (300, 300))
    with ExitStack() as stack:
        more = [stack.enter_context(connect(address)) for _ in range(20)]
        assert all(reply_of(connection).startswith(b"HTTP/1.1 200 ") for connection in more)
    (line,) = [line for line in log.read_text().splitlines() if "ulimit -n" in line]
    assert os.strerror(errno.EMFILE) in line and "WARNING" in line


def test_the_default_leaves_room_for_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def limited(count: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (count, count))

    opened = len(os.listdir("/dev/fd"))
    limited(opened + 1000)
    assert opened + 1000 - 2 * acceptor._OTHER_FILES < allowed_connections(None) + opened < opened + 1000
    assert allowed_connections(10) == 10
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        assert allowed_connections(5000) == allowed_connections(None)
    assert "--max-connections=5000 is more than" in caplog.text
    limited(1 << 20)
    assert allowed_connections(None) == acceptor._MAX_DEFAULT
    assert allowed_connections(100_000) == 100_000
    limited(resource.RLIM_INFINITY)
    assert allowed_connections(None) == acceptor._MAX_DEFAULT
    limited(1)
    assert allowed_connections(None) == 1
