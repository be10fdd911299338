"""HttpProtocol: what a client may send, how long it may take, how many there may be, and responses that come early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from tests.server.wire import chunks, received, replies, talk

from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app
from millpond.server.launch.protocol import _Transport
from tests.server import wire
from tests.server.conftest import Server, address_of, serving

MOST = 1 << 16
SHORT = 0.3  # seconds that a hasty server gives its clients
CLOSE = b"Connection: close\r\n"
KEY = b"Authorization: Bearer key\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: pond\r\n"
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nContent-Type: application/json\r\n" + KEY
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
BODY = b'{"input": "The pond."}'
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.fixture(scope="module")
def start(embedder: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server with a key over one model; ``around`` replaces its application by one that calls it."""
    stack = ExitStack()

    def start(*, keep_alive: float = 30, around: Any = None, **settings: Any) -> Server:
        config = ServerConfig(api_keys=("key",), max_body_bytes=100_000, **settings)
        app = create_app(ServedModels.load([ModelConfig(model=str(embedder), names=("pond",))]), config)
        served: Any = app if around is None else _Around(app, around)
        return stack.enter_context(serving(served, config, keep_alive=keep_alive))

    with stack:
        yield start


class _Around:
    def __init__(self, app: FastAPI, around: Callable[[Any, Any, Any, Any], Awaitable[None]]) -> None:
        self.state, self._call = app.state, partial(around, app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._call(scope, receive, send)


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture(scope="module")
def hasty(start: Callable[..., Server]) -> Server:
    return start(keep_alive=SHORT)


def request(more: bytes = b"", **body: Any) -> bytes:
    content = json.dumps(body).encode() if body else BODY
    return POST + b"Content-Length: %d\r\n" % len(content) + more + b"\r\n" + content


def chunked(*parts: bytes) -> bytes:
    return POST + chunks(*parts)


def cut(data: bytes, step: int) -> list[bytes]:
    return [data[i : i + step] for i in range(0, len(data), step)]


def connect(server: Server) -> socket.socket:
    return wire.connect(address_of(server))


def answers(server: Server, *parts: bytes) -> list[tuple[int, bytes]]:
    """The status and the body of each response, until the server closes."""
    return [(status, body) for status, _, body in replies(talk(address_of(server), *parts))]


def statuses(server: Server, *parts: bytes) -> list[int]:
    return [status for status, _ in answers(server, *parts)]


LAST = request(CLOSE)


@pytest.mark.parametrize("offer", [OFFER, b"upgrade: TLS/1.2, h2c\r\nConnection: upgrade\r\n"])
def test_an_offer_of_another_protocol_is_passed_over(server: Server, offer: bytes) -> None:
    # As Java's client has it: the offer with every request, the body behind it.
    text = request(input="x\r\nUpgrade: h2c\r\n\r\nUpgrade: h2c\r\n")
    assert statuses(server, request(offer), text, LAST) == [200, 200, 200]


# --- Sizes ----------------------------------------------------------------------------------------------------------


def head_of(size: int) -> bytes:
    start = GET + CLOSE + b"X: "
    return start + b"x" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        pytest.param([head_of(MOST)], [200], id="64 KiB"),
        pytest.param([head_of(MOST + 1)], [431], id="one more"),
        pytest.param(cut(head_of(MOST + 1), 30_000), [431], id="one more in pieces"),
        pytest.param([request() + head_of(MOST + 1)], [200, 431], id="behind a request"),
        pytest.param(cut(b"X" * 10_000_000, 100_000), [400], id="a method"),
        pytest.param([b"\r\n" * 9000] * 8, [431], id="empty lines"),
        pytest.param([b"\r\n" * 20, LAST], [200], id="some empty lines"),
        pytest.param([request(input="pond " * 15_000, truncate_prompt_tokens=8) * 3, LAST], [200] * 4, id="bodies"),
    ],
)
def test_a_head_has_64_kib_however_it_arrives(server: Server, parts: list[bytes], expected: list[int]) -> None:
    assert statuses(server, *parts) == expected


LATE = b"Host: b\r\nX-Request-Id: trailer\r\n"


def test_a_trailer_never_becomes_a_header(server: Server) -> None:
    no_key = CHUNKED.replace(KEY, b"") + b"\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY) + KEY + LATE + b"\r\n"
    assert statuses(server, no_key, GET + CLOSE + b"\r\n") == [401, 200]
    assert statuses(server, chunked(BODY) + b"0\r\n" + LATE + b"\r\n", LAST) == [200, 200]
    assert statuses(server, chunked(BODY) + b"0\r\nConnection: close\r\n\r\n", LAST) == [200]


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(b"2;ext=" + b"a" * 200_000, id="an extension"),
        pytest.param((b"1;" + b"e" * 90 + b"\r\n \r\n") * 4000, id="small chunks with extensions"),
        pytest.param(b"0" * 200_000, id="a size"),
        pytest.param(b"0\r\nA: " + b"a" * 200_000, id="a trailer"),
        pytest.param(b"0\r\n" + b"a1: b\r\n" * 40_000, id="trailers"),
    ],
)
@pytest.mark.parametrize("head", [CHUNKED, CHUNKED.replace(KEY, b"")], ids=["key", "no key"])
def test_chunks_and_trailers_are_bounded(server: Server, head: bytes, endless: bytes) -> None:
    """What follows the head is read in pieces, and the connection is closed long before its end."""
    (status,) = statuses(server, head + b"\r\n", *cut(endless, 20_000))
    assert status in ((400, 431) if KEY in head else (400, 401, 431))


# --- Messages that are not requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "more", "expected"),
    [
        (b"GET /health HTTP/1.1", b"", 400),
        (b"GET /health HTTP/1.1", b"Host: a\r\nHost: a\r\n", 400),
        (b"GET /health HTTP/1.0", b"", 200),
        (b"GET /health HTTP/2.0", b"Host: a\r\n", 505),
        (b"POST /ping HTTP/1.1", b"Host: a\r\nTransfer-Encoding: gzip, chunked\r\n", 400),
        (b"POST /ping HTTP/1.1", b"Host: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"POST /ping HTTP/1.1", b"Host: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n", 400),
        (b"POST /ping HTTP/1.0", b"Transfer-Encoding: chunked\r\n", 400),
        (b"GET /health HTTP/1.1", b"Host: a\r\nX: a\r\n folded\r\n", 400),
        (b"GET /health HTTP/1.1", b"Host: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n", 400),
        (b"POST /ping HTTP/1.1", b"Host: a\r\nContent-Length: 200001\r\n", 413),
        (b"DELETE /none HTTP/1.1", KEY + b"Host: a\r\nContent-Length: 18446744073709551615\r\n", 413),
    ],
)
def test_a_message_that_is_not_a_request_is_refused_and_not_read_on(
    server: Server, first: bytes, more: bytes, expected: int
) -> None:
    smuggled = b"" if expected == 200 else b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: a\r\n\r\n"
    ((status, body),) = answers(server, first + b"\r\n" + more + b"\r\n" + smuggled)
    assert status == expected
    if expected == 505:
        assert json.loads(body)["error"]["message"] == "Unsupported HTTP version 2.0; use HTTP/1.1"


@pytest.mark.parametrize("bad", [b"GET /health HTTP/1.1\r\n\r\n", b"What is this?\r\n\r\n", chunked(b"{") + b"zz\r\n"])
def test_a_refusal_comes_after_the_responses_before_it(server: Server, bad: bytes) -> None:
    replies = answers(server, request() * 3 + bad + GET + b"\r\n")
    assert [status for status, _ in replies] == [200, 200, 200, 400]
    assert json.loads(replies[3][1])["error"]["type"] == "Bad Request"


# --- Responses that come before the end of the body -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (POST.replace(KEY, b"") + b"Content-Length: 90000\r\n", 401),
        (CHUNKED.replace(KEY, b""), 401),
        (POST.replace(KEY, b"") + b"Expect: 100-continue\r\nContent-Length: 90000\r\n", 401),
        (POST.replace(b"/v1/embeddings", b"/none") + b"Content-Length: 90000\r\n", 404),
        (POST + b"Expect: 100-continue\r\nContent-Length: 100001\r\n", 413),
        (GET + b"Content-Length: 5\r\n", 200),
    ],
)
def test_a_response_before_the_end_of_the_body_closes(server: Server, head: bytes, expected: int) -> None:
    """In particular a key is asked for before a body is read."""
    with connect(server) as connection:
        connection.sendall(head + b"\r\n")
        reply = received(connection)  # without a byte of the body
        assert reply.startswith(b"HTTP/1.1 %d " % expected) and b"100 Continue" not in reply
        assert b"connection: close\r\n" in reply.lower()


def test_a_client_that_is_still_sending_reads_its_response(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(POST.replace(KEY, b"") + b"Content-Length: 20000000\r\n\r\n")
        assert connection.recv(1, socket.MSG_PEEK) == b"H"  # the response is there
        for _ in range(200):
            connection.sendall(b"x" * 100_000)
        assert received(connection).startswith(b"HTTP/1.1 401 ")


def test_a_complete_request_keeps_its_connection(server: Server) -> None:
    refused = request().replace(KEY, b"")
    assert statuses(server, refused, GET + b"Content-Length: 2\r\n\r\n{}", LAST) == [401, 200, 200]


# --- Time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "drip", "expected"),
    [
        pytest.param([b"GE"], b"", [], id="two bytes"),
        pytest.param([GET + b"\r\n"], b"\r\n", [200], id="empty lines behind a request"),
        pytest.param([POST.replace(KEY, b"") + b"Content-Length: 900\r\n\r\n"], b"x", [401], id="the body of a 401"),
        pytest.param([POST + b"Content-Length: 900\r\n\r\n{"], b"", [408], id="half a body"),
        pytest.param([chunked(BODY) + b"5;"], b"a", [408], id="a slow extension"),
        pytest.param([request() * 2 + POST + b"Content-Length: 9\r\n\r\n"], b"", [200, 200, 408], id="a third body"),
    ],
)
def test_a_connection_without_progress_is_closed(
    hasty: Server, parts: list[bytes], drip: bytes, expected: list[int]
) -> None:
    """Whatever drips in."""
    with connect(hasty) as connection:
        for part in parts:
            connection.sendall(part)
        connection.settimeout(SHORT / 3)
        data = b""
        for _ in range(90):  # each of them may wait
            try:
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                data += piece
            except TimeoutError:
                with contextlib.suppress(OSError):
                    connection.sendall(drip)
            except ConnectionResetError:
                break
        else:
            pytest.fail("the connection stays open")
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", data)] == expected


def test_a_slow_upload_that_gets_on_is_read(hasty: Server) -> None:
    pause = threading.Event()
    with connect(hasty) as connection:
        connection.sendall(POST + CLOSE + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for part in cut(BODY, 5):  # 5 parts, which take longer than the time for one
            pause.wait(SHORT / 3)
            connection.sendall(part)
        assert received(connection).startswith(b"HTTP/1.1 200 ")


def test_the_metrics_know_what_the_protocol_answered(hasty: Server) -> None:
    assert statuses(hasty, CHUNKED + b"\r\n1\r\n{\r\n", b"zz\r\n") == [400]
    assert statuses(hasty, POST + b"Content-Length: 9\r\n\r\n{") == [408]
    ((_, metrics),) = answers(hasty, GET.replace(b"/health", b"/metrics") + CLOSE + b"\r\n")
    counts = re.findall(rb'millpond_requests_total\{.*route="/v1/embeddings",status="(\d+)"\}', metrics)
    assert {b"400", b"408"} <= set(counts) and b"499" not in counts


def test_a_request_that_waits_for_its_response_is_not_cut(start: Callable[..., Server]) -> None:
    async def slow(app: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await asyncio.sleep(3 * SHORT)
        await app(scope, receive, send)

    assert statuses(start(keep_alive=SHORT, around=slow), GET + b"\r\n" + GET + CLOSE + b"\r\n") == [200, 200]


def test_a_pipelined_request_of_a_client_that_leaves_is_given_up(start: Callable[..., Server]) -> None:
    """Also the earlier one, whose work would be in vain."""
    begun, ended = threading.Event(), threading.Event()

    async def listening(app: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        message = await receive()
        begun.set()
        while message["type"] != "http.disconnect":
            message = await receive()
        ended.set()

    with connect(start(around=listening)) as connection:
        connection.sendall(GET + b"\r\n" + GET.replace(b"health", b"second") + b"\r\n")
        assert begun.wait(30)
    assert ended.wait(30)


def test_a_response_that_nobody_reads_does_not_hold_its_connection(start: Callable[..., Server]) -> None:
    size = 20_000_000  # more than the buffers of the sockets hold

    async def large(app: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": bytes(size)})

    server, pause = start(keep_alive=SHORT, around=large), threading.Event()
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(GET + b"\r\n")
        for _ in range(200):
            if not pause.wait(0.05) and not server.server_state.connections:
                break
        assert not server.server_state.connections


# --- Connections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [False, True], ids=["TCP", "a Unix socket"])
def test_at_the_cap_a_new_connection_is_told_to_come_back(
    start: Callable[..., Server], tmp_path: Path, file: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "socket" if file else None
    server = start(max_connections=3, keep_alive=SHORT, uds=path)

    def connected() -> socket.socket:
        if path is None:
            return connect(server)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(30)
        connection.connect(str(path))
        return connection

    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        held = [stack.enter_context(connected()) for _ in range(3)]
        for connection in held:
            connection.sendall(b"GE")
        for _ in range(4):
            head, _, body = received(stack.enter_context(connected())).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head.lower()
            assert b"3 connections" in body
        assert all(received(connection) == b"" for connection in held)  # their time is over
    with connected() as last:
        last.sendall(GET + CLOSE + b"\r\n")
        assert received(last).startswith(b"HTTP/1.1 200 ")
    assert ["--max-connections" in each.getMessage() for each in caplog.records] == [True]  # once for all of them


def test_a_head_is_sent_with_the_first_part_of_its_body() -> None:
    sent: list[list[bytes]] = []
    wire = SimpleNamespace(write=lambda data: sent.append([data]), writelines=lambda parts: sent.append(list(parts)))
    responses = _Transport(None, wire)  # type: ignore[arg-type]
    for part in (b"HTTP/1.1 100 Continue\r\n\r\n", b"head", b"body", b"more"):
        responses.write(part)
    responses.end()
    responses.write(b"head of a response without a body")
    responses.end()
    responses.end()
    assert sent == [
        [b"HTTP/1.1 100 Continue\r\n\r\n"],
        [b"head", b"body"],
        [b"more"],
        [b"head of a response without a body"],
    ]
