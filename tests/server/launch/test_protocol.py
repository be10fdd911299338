"""HttpProtocol: offers of other protocols, what may be sent and how long it may take, and answers that come early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.server.conftest import address_of, serving

from millpond.server.app import create_app
from millpond.server.launch.server import Server
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
CLOSE = b"Connection: close\r\n"


@pytest.fixture(scope="module")
def server(embedder: Path) -> Iterator[Server]:
    with serving(create_app(ServedModels.load([ModelConfig(model=str(embedder), names=("pond",))]))) as server:
        yield server


def request(more: bytes = b"", **body: Any) -> bytes:
    content = json.dumps(body or {"input": "The pond."}).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    return head % len(content) + more + b"\r\n" + content


def answers(server: Server, *parts: bytes, last: bool = True) -> list[tuple[int, bytes]]:
    """The status and the body of each answer."""
    address = urlsplit(address_of(server))
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        with contextlib.suppress(OSError):  # it does not listen any more
            for part in parts:
                connection.sendall(part)
        received = b""
        # It may have closed before the last part came; what it sent is read first.
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                received += part
    replies = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None
        replies.append((int(head.split()[1]), received[: int(length[1])]))
        received = received[int(length[1]) :]
    return replies


@pytest.mark.parametrize("offer", [OFFER, OFFER.lower(), b"upgrade: TLS/1.2, h2c\r\nConnection: upgrade\r\n"])
def test_an_offer_of_another_protocol_is_passed_over(server: Server, offer: bytes) -> None:
    # As Java's client has it: the offer with every request, the body behind it.
    (first, vector), (second, _) = answers(server, request(offer), request(CLOSE))
    assert (first, second) == (200, 200)
    assert len(json.loads(vector)["data"]) == 1


def test_an_offer_whose_body_comes_later(server: Server) -> None:
    head, end, body = request(OFFER).partition(b"\r\n\r\n")
    assert [status for status, _ in answers(server, head + end, body[:5], body[5:] + request(CLOSE))] == [200, 200]


def test_a_websocket_is_a_request_like_any_other(server: Server) -> None:
    upgrade = b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n"
    head = b"GET /v1/models HTTP/1.1\r\nHost: pond\r\nConnection: Upgrade, close\r\n" + upgrade + b"\r\n"
    ((status, body),) = answers(server, head)
    assert status == 200 and json.loads(body)["data"][0]["id"] == "pond"


def test_a_text_may_speak_of_upgrades(server: Server) -> None:
    replies = answers(server, request(input="x\r\nUpgrade: h2c\r\n\r\nUpgrade: h2c\r\n"), request(CLOSE))
    assert [status for status, _ in replies] == [200, 200]


def test_a_head_without_an_end_is_refused(server: Server) -> None:
    address = urlsplit(address_of(server))
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: pond\r\n")
        received = b""
        try:
            for _ in range(1000):
                connection.sendall(b"X-More: " + b"x" * 8000 + b"\r\n")
        except OSError:  # nobody reads it any more
            pass
        else:
            pytest.fail("8 MB of headers were read")
        try:
            received = connection.recv(1 << 16)
        except OSError:  # what was not read broke the connection
            return
        assert received.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


def test_the_refusal_is_an_error_like_any_other(server: Server) -> None:
    ((status, body),) = answers(server, b"GET /health HTTP/1.1\r\nHost: pond\r\n", b"X: " + b"x" * 66_000)
    assert status == 431
    assert json.loads(body)["error"]["type"] == "Request Header Fields Too Large"
    ((status, body),) = answers(server, b"What is this?\r\n\r\n")
    assert status == 400
    assert json.loads(body)["error"]["message"] == "Invalid HTTP request received."


def test_many_requests_on_one_connection_are_no_long_head(server: Server) -> None:
    many = request(input="pond " * 3000, truncate_prompt_tokens=8) * 12
    assert [status for status, _ in answers(server, many + request(CLOSE))] == [200] * 13


def test_a_large_body_is_no_part_of_the_head_behind_it(server: Server) -> None:
    many = request(input="pond " * 30_000, truncate_prompt_tokens=8) * 3
    last = request(CLOSE)
    assert [status for status, _ in answers(server, many + last[:30], last[30:])] == [200] * 4


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"], ids=["nothing", "half a head"])
def test_who_does_not_come_to_the_point_is_not_waited_for(embedder: Path, sent: bytes) -> None:
    app = create_app(ServedModels.load([ModelConfig(model=str(embedder))]))
    with serving(app, keep_alive=1) as server:
        assert answers(server, sent) == []


# --- The size of a head ---------------------------------------------------------------------------------------------

MOST = 1 << 16
CHUNKED = (
    b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
)
BODY = b'{"input": "The pond."}'


def head_of(size: int, *, close: bool = True) -> bytes:
    """A GET whose head has ``size`` bytes."""
    start = b"GET /health HTTP/1.1\r\nHost: pond\r\n" + (CLOSE if close else b"") + b"X: "
    return start + b"x" * (size - len(start) - 4) + b"\r\n\r\n"


def chunked(*chunks: bytes) -> bytes:
    return CHUNKED + b"\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in chunks)


def cut(data: bytes, step: int) -> list[bytes]:
    return [data[i : i + step] for i in range(0, len(data), step)]


@pytest.mark.parametrize(("size", "expected"), [(MOST, 200), (MOST + 1, 431), (100_000, 431), (300_000, 431)])
@pytest.mark.parametrize("step", [1 << 20, MOST // 2, MOST - 1, 8000])
def test_a_head_has_64_kib_however_it_arrives(server: Server, size: int, expected: int, step: int) -> None:
    assert [status for status, _ in answers(server, *cut(head_of(size), step))] == [expected]


@pytest.mark.parametrize(("size", "expected"), [(MOST, 200), (MOST + 1, 431)])
def test_a_head_behind_other_requests_has_as_much(server: Server, size: int, expected: int) -> None:
    for before in (head_of(100, close=False), request(), chunked(BODY, b"")):
        assert [status for status, _ in answers(server, before + head_of(size))] == [200, expected]


@pytest.mark.parametrize("head", [b"GET /" + b"a" * 70_000, b"GET / HTTP/1.1\r\nHost: pond\r\n" + b"a: b\r\n" * 20_000])
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_long_path_and_many_headers_are_long_heads(server: Server, head: bytes, end: bytes) -> None:
    assert answers(server, head + end)[0][0] == 431


def test_spaces_around_a_value_count_and_are_no_part_of_it(server: Server) -> None:
    padded = (
        request().replace(b"Content-Length: ", b"Content-Length: \t  ").replace(b"\r\n\r\n", b" \t\r\nX: a\t \r\n\r\n")
    )
    assert [status for status, _ in answers(server, padded + request(CLOSE))] == [200, 200]
    assert answers(server, b"GET /health HTTP/1.1\r\nHost: pond\r\nX:" + b" " * 70_000 + b"\r\n\r\n")[0][0] == 431


def test_empty_lines_are_bounded_too(server: Server) -> None:
    assert answers(server, b"\r\n" * 20, request(CLOSE))[0][0] == 200
    assert answers(server, *[b"\r\n" * 9000] * 4)[0][0] == 431


# --- Trailers and chunks --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(embedder: Path) -> Iterator[Server]:
    """With a key."""
    config = ServerConfig(api_keys=("key",), max_body_bytes=100_000)
    app = create_app(ServedModels.load([ModelConfig(model=str(embedder), names=("pond",))]), config)
    with serving(app, config) as server:
        yield server


KEY = b"Authorization: Bearer key\r\n"


def with_key(message: bytes) -> bytes:
    return message.replace(b"Host: pond\r\n", b"Host: pond\r\n" + KEY)


def test_a_trailer_is_no_header(guarded: Server) -> None:
    trailers = KEY + b"Host: b\r\nX-Request-Id: trailer\r\nExpect: 100-continue\r\n\r\n"
    late = CHUNKED + b"\r\n" + b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY) + trailers
    assert [status for status, _ in answers(guarded, late, request(CLOSE))] == [401, 401]
    assert [status for status, _ in answers(guarded, with_key(late), with_key(request(CLOSE)))] == [200, 200]


@pytest.mark.parametrize("value", [b"close", b"keep-alive", b"upgrade\r\nUpgrade: h2c"])
def test_a_connection_whose_trailers_speak_of_it_is_closed(server: Server, value: bytes) -> None:
    """The parser reads nothing after such a trailer, so that the client would wait for a second answer."""
    message = CHUNKED + b"\r\n%x\r\n%s\r\n0\r\nConnection: %s\r\n\r\n" % (len(BODY), BODY, value)
    assert [status for status, _ in answers(server, message, request())] == [200]


def test_a_trailer_does_not_reach_the_application(embedder: Path) -> None:
    app = create_app(ServedModels.load([ModelConfig(model=str(embedder))]))
    seen: list[list[bytes]] = []

    async def look(scope: Any, receive: Any, send: Any) -> None:
        async def received() -> Any:
            message = await receive()
            if scope["type"] == "http" and not message.get("more_body"):
                seen.append([name for name, _ in scope["headers"]])
            return message

        await app(scope, received, send)

    look.state = app.state  # type: ignore[attr-defined]
    with serving(look) as server:  # type: ignore[arg-type]
        message = CHUNKED + CLOSE + b"\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
        assert answers(server, message, b"Authorization: a\r\n", b"b: c\r\n\r\n")[0][0] == 200
    assert seen and all(b"authorization" not in names and b"b" not in names for names in seen)


@pytest.mark.parametrize("step", [1 << 20, 5000])
@pytest.mark.parametrize("trailer", [b"a1: b\r\n" * 20_000, b"a: " + b"b" * 140_000], ids=["many", "a long one"])
def test_trailers_are_bounded(guarded: Server, trailer: bytes, step: int) -> None:
    message = with_key(chunked(BODY)) + b"0\r\n" + trailer + b"\r\n\r\n"
    ((status, _),) = answers(guarded, *cut(message, step))
    assert status in (400, 431)


def test_some_trailers_are_passed_over(guarded: Server) -> None:
    message = with_key(chunked(BODY)) + b"0\r\n" + b"a1: b\r\n" * 5000 + b"\r\n"
    assert [status for status, _ in answers(guarded, message, with_key(request(CLOSE)))] == [200, 200]


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(b"2;ext=" + b"a" * 200_000, id="an extension"),
        pytest.param(b"0" * 200_000, id="a size"),
        pytest.param((b"1;" + b"e" * 90 + b"\r\n \r\n") * 4000, id="small chunks with extensions"),
        pytest.param(b"0\r\nA: " + b"a" * 200_000, id="a trailer"),
        pytest.param(b"0\r\n" + b"a1: b\r\n" * 40_000, id="trailers"),
    ],
)
@pytest.mark.parametrize("key", [True, False], ids=["key", "no key"])
def test_chunks_are_bounded(guarded: Server, endless: bytes, key: bool) -> None:
    """What follows the head is read in pieces, and the connection is closed long before its end."""
    head = CHUNKED + b"\r\n"
    replies = answers(guarded, with_key(head) if key else head, *cut(endless, 20_000))
    assert replies[-1][0] in (400, 401, 431)
    assert len(replies) == 1


def test_small_chunks_are_read(server: Server) -> None:
    text = b'{"input": "' + b"a" * 30_000 + b'", "truncate_prompt_tokens": 8}'
    message = CHUNKED + CLOSE + b"\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    assert answers(server, *cut(message, 10_000))[0][0] == 200


def test_large_chunks_with_extensions_are_read(server: Server) -> None:
    pieces = cut(b'{"input": "' + b"a" * 200_000 + b'", "truncate_prompt_tokens": 8}', 5000)
    message = b"".join(b"%x;sha=%064x\r\n%s\r\n" % (len(each), 7, each) for each in pieces)
    assert answers(server, CHUNKED + CLOSE + b"\r\n" + message + b"0;last\r\n\r\n")[0][0] == 200


# --- Lengths --------------------------------------------------------------------------------------------------------

GET = b"GET /health HTTP/1.1\r\nHost: pond\r\n"


@pytest.mark.parametrize("length", [b"18446744073709551615", b"9999999999999999999", b"200001"])
@pytest.mark.parametrize(
    "line", [b"POST /v1/embeddings", b"POST /ping", b"GET /health", b"GET /v1/models", b"DELETE /none"]
)
def test_a_body_too_large_to_be_read_is_refused_at_once_on_every_route(
    guarded: Server, length: bytes, line: bytes
) -> None:
    head = line + b" HTTP/1.1\r\nHost: pond\r\nContent-Type: application/json\r\n" + KEY
    ((status, body),) = answers(guarded, head + b"Content-Length: " + length + b"\r\n\r\n")
    assert status == 413
    assert "100000 bytes" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "length",
    [
        b"18446744073709551616",
        b"-1",
        b"+5",
        b"5, 5",
        b"5\r\nContent-Length: 6",
        b"5\r\nContent-Length: 5",
        b"",
        b"0x5",
        b"5 5",
    ],
)
def test_a_length_that_is_none_is_refused(guarded: Server, length: bytes) -> None:
    for head in (GET, with_key(GET.replace(b"GET /health", b"POST /v1/embeddings"))):
        assert [status for status, _ in answers(guarded, head + b"Content-Length: " + length + b"\r\n\r\nabcde")] == [
            400
        ]


@pytest.mark.parametrize(
    ("first", "more", "expected"),
    [
        (b"GET /health HTTP/1.1", b"", 400),
        (b"GET /health HTTP/1.1", b"Host: a\r\nHost: a\r\n", 400),
        (b"GET /health HTTP/1.1", b"Host: a b\r\n", 400),
        (b"GET /health HTTP/1.0", b"", 200),
        (b"GET /health HTTP/2.0", b"Host: a\r\n", 505),
        (b"POST /ping HTTP/1.1", b"Host: a\r\nTransfer-Encoding: gzip, chunked\r\n", 400),
        (b"POST /ping HTTP/1.1", b"Host: a\r\nTransfer-Encoding: chunked, chunked\r\n", 400),
        (b"POST /ping HTTP/1.1", b"Host: a\r\nTransfer-Encoding: identity\r\n", 400),
        (b"POST /ping HTTP/1.1", b"Host: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n", 400),
        (b"POST /ping HTTP/1.1", b"Host: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"POST /ping HTTP/1.0", b"Transfer-Encoding: chunked\r\n", 400),
        (b"GET /health HTTP/1.1", b"Host: a\r\nX: a\r\n folded\r\n", 400),
        (b"GET /health HTTP/1.1", b"Host: a\r\nX: a\x00b\r\n", 400),
        (b"GET /health HTTP/1.1", b"Host: a\r\nX: a\nY: b\r\n", 400),
        (b"GET /health HTTP/1.1", b"Host: a\r\nX: a\rb\r\n", 400),
        (b"GET /health HTTP/1.1", b"Host: a\r\nX : a\r\n", 400),
        (b"GET /health HTTP/1.1", b"Host: a\r\n: a\r\n", 400),
        (b"GET /health HTTP/1.1", b" Host: a\r\n", 400),
    ],
)
def test_a_message_that_is_no_request_is_refused_and_not_read_on(
    server: Server, first: bytes, more: bytes, expected: int
) -> None:
    smuggled = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: a\r\n\r\n"
    after = b"" if expected == 200 else smuggled
    assert [status for status, _ in answers(server, first + b"\r\n" + more + b"\r\n" + after)] == [expected]


@pytest.mark.parametrize("bad", [b"GET /health HTTP/1.1\r\n\r\n", b"What is this?\r\n\r\n", chunked(b"{") + b"zz\r\n"])
def test_a_refusal_comes_after_the_answers_before_it(server: Server, bad: bytes) -> None:
    many = request() * 3
    replies = answers(server, many + bad + GET + b"\r\n")
    assert [status for status, _ in replies] == [200, 200, 200, 400]
    assert [len(json.loads(body).get("data", ())) for _, body in replies] == [1, 1, 1, 0]


# --- Answers that come before the end of the body -------------------------------------------------------------------


def wait_closed(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def connect(server: Server) -> socket.socket:
    address = urlsplit(address_of(server))
    return socket.create_connection((address.hostname, address.port), timeout=30)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nContent-Length: 90000\r\n", 401),
        (b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nTransfer-Encoding: chunked\r\n", 401),
        (b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nExpect: 100-continue\r\nContent-Length: 90000\r\n", 401),
        (b"POST /none HTTP/1.1\r\nHost: pond\r\nContent-Length: 90000\r\n" + KEY, 404),
        (b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nContent-Length: 90000\r\n" + KEY, 400),  # its content type
        (
            b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nExpect: 100-continue\r\nContent-Length: 100001\r\n" + KEY,
            413,
        ),
        (b"GET /health HTTP/1.1\r\nHost: pond\r\nContent-Length: 5\r\n", 200),
        (b"HEAD /health HTTP/1.1\r\nHost: pond\r\nContent-Length: 5\r\n", 200),
    ],
)
def test_an_answer_before_the_end_of_the_body_closes(guarded: Server, head: bytes, expected: int) -> None:
    with connect(guarded) as connection:
        connection.sendall(head + b"\r\n")
        reply = wait_closed(connection)  # without a byte of the body
        assert reply.startswith(b"HTTP/1.1 %d " % expected)
        assert b"connection: close\r\n" in reply.lower()
        assert b"100 Continue" not in reply
        connection.sendall(b"x")  # nobody is told that it was in vain


def test_a_client_that_is_still_sending_reads_its_answer(guarded: Server) -> None:
    with connect(guarded) as connection:
        connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nContent-Length: 20000000\r\n" + b"\r\n")
        time.sleep(0.2)  # the answer is there
        for _ in range(200):
            connection.sendall(b"x" * 100_000)
        assert wait_closed(connection).startswith(b"HTTP/1.1 401 ")


def test_a_complete_request_keeps_its_connection(guarded: Server) -> None:
    body = request()
    assert [
        status for status, _ in answers(guarded, body, GET + b"Content-Length: 2\r\n\r\n{}", with_key(request(CLOSE)))
    ] == [401, 200, 200]


def test_what_comes_behind_an_answered_body_is_not_served(guarded: Server) -> None:
    with connect(guarded) as connection:
        connection.sendall(b"POST /none HTTP/1.1\r\nHost: pond\r\nContent-Length: 5\r\n\r\n")
        time.sleep(0.2)
        connection.sendall(b"abcde" + GET + b"\r\n")
        assert wait_closed(connection).count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("line", [b"GET /health HTTP/1.0", b"POST /v1/embeddings HTTP/1.0"])
def test_the_older_protocol_knows_no_100(server: Server, line: bytes) -> None:
    message = line + b"\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(
        BODY
    )
    with connect(server) as connection:
        connection.sendall(message)
        time.sleep(0.1)
        connection.sendall(BODY)
        reply = wait_closed(connection)
    assert b"100 Continue" not in reply
    assert b" 200 OK\r\n" in reply


# --- Time -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hasty(embedder: Path) -> Iterator[Server]:
    """With a key, and one second for its clients."""
    config = ServerConfig(api_keys=("key",))
    app = create_app(ServedModels.load([ModelConfig(model=str(embedder), names=("pond",))]), config)
    with serving(app, config, keep_alive=1) as server:
        yield server


POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("parts", "drip", "expected"),
    [
        pytest.param([], b"", [], id="nothing"),
        pytest.param([], b"\r\n", [], id="empty lines"),
        pytest.param([GET + b"\r\n"], b"\r\n", [200], id="empty lines behind a request"),
        pytest.param([GET], b"X: y\r\n", [], id="a head without an end"),
        pytest.param([], b"G", [400], id="a method"),
        pytest.param([GET + b"\r\n" + GET], b"X: y\r\n", [200], id="a head behind a request"),
        pytest.param([POST + b"Content-Length: 900\r\n\r\n"], b"x", [401], id="the body of a 401"),
        pytest.param(
            [with_key(POST).replace(b"json", b"text") + b"Content-Length: 900\r\n\r\n"],
            b"x",
            [400],
            id="the body of a 400",
        ),
        pytest.param([with_key(POST) + b"Content-Length: 900\r\n\r\n"], b"", [408], id="no body"),
        pytest.param([with_key(POST) + b"Content-Length: 900\r\n\r\n{"], b"", [408], id="half a body"),
        pytest.param([with_key(chunked(BODY)) + b"0\r\n"], b"a: b\r\n", [408], id="trailers"),
        pytest.param([with_key(chunked(BODY)) + b"5;"], b"a", [408], id="an extension"),
        pytest.param([with_key(chunked(BODY)) + b"0"], b"0", [408], id="a size"),
        pytest.param(
            [with_key(request()), with_key(POST) + b"Content-Length: 9\r\n\r\n"], b"", [200, 408], id="a second body"
        ),
        pytest.param(
            [with_key(request() * 2) + with_key(POST) + b"Content-Length: 9\r\n\r\n"],
            b"",
            [200, 200, 408],
            id="a third one",
        ),
    ],
)
def test_a_connection_without_progress_is_closed(
    hasty: Server, parts: list[bytes], drip: bytes, expected: list[int]
) -> None:
    """Whatever drips in; a connection that is never closed would be held for 20 s here."""
    with connect(hasty) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        connection.settimeout(0.1)
        received, end = b"", time.monotonic() + 20
        while time.monotonic() < end:
            try:
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                received += piece
            except TimeoutError:
                try:
                    connection.sendall(drip)
                except OSError:
                    break
            except ConnectionResetError:
                break
        else:
            pytest.fail("the connection stays open")
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", received)] == expected


def test_the_metrics_know_what_the_protocol_answered(embedder: Path) -> None:
    app = create_app(ServedModels.load([ModelConfig(model=str(embedder), names=("pond",))]))
    with serving(app, keep_alive=1) as server:
        assert [status for status, _ in answers(server, POST + b"Content-Length: 9\r\n\r\n{")] == [408]
        assert [status for status, _ in answers(server, CHUNKED + b"\r\n1\r\n{\r\n", b"zz\r\n")] == [400]
        ((_, metrics),) = answers(server, b"GET /metrics HTTP/1.1\r\nHost: pond\r\n" + CLOSE + b"\r\n")
    counts = re.findall(rb'millpond_requests_total\{.*route="/v1/embeddings",status="(\d+)"\} (\S+)', metrics)
    assert sorted(counts) == [(b"400", b"1.0"), (b"408", b"1.0")]


def test_a_pipelined_request_of_a_client_that_leaves_is_given_up(embedder: Path) -> None:
    """Also the earlier one, whose work would be in vain."""
    app = create_app(ServedModels.load([ModelConfig(model=str(embedder))]))
    ended: list[str] = []

    async def listening(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        message = {"type": "http.request"}
        while message["type"] != "http.disconnect":
            message = await receive()
        ended.append(scope["path"])

    listening.state = app.state  # type: ignore[attr-defined]
    with serving(listening) as server:  # type: ignore[arg-type]
        with connect(server) as connection:
            connection.sendall(GET + b"\r\n" + GET.replace(b"health", b"second") + b"\r\n")
            time.sleep(0.2)
        end = time.monotonic() + 20
        while "/health" not in ended:
            assert time.monotonic() < end, "it is still waited for"
            time.sleep(0.05)


def test_a_slow_upload_that_gets_on_is_read(hasty: Server) -> None:
    with connect(hasty) as connection:
        connection.sendall(with_key(POST) + CLOSE + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for part in cut(BODY, 5):  # 5 parts, which take longer than the time for one
            time.sleep(0.3)
            connection.sendall(part)
        assert wait_closed(connection).startswith(b"HTTP/1.1 200 ")


def test_a_request_that_waits_for_its_answer_is_not_cut(embedder: Path) -> None:
    app = create_app(ServedModels.load([ModelConfig(model=str(embedder))]))

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            while (await receive()).get("more_body"):
                pass
            await asyncio.sleep(1.6)
        await app(scope, receive, send)

    slow.state = app.state  # type: ignore[attr-defined]
    with serving(slow, keep_alive=1) as server:  # type: ignore[arg-type]
        sent = (
            b"GET /health HTTP/1.1\r\nHost: pond\r\n\r\n" + b"GET /health HTTP/1.1\r\nHost: pond\r\n" + CLOSE + b"\r\n"
        )
        assert [status for status, _ in answers(server, sent)] == [200, 200]


def test_an_answer_that_nobody_reads_does_not_hold_its_connection(embedder: Path) -> None:
    app = create_app(ServedModels.load([ModelConfig(model=str(embedder), names=("pond",))]))
    with serving(app, keep_alive=1) as server, connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            for _ in range(60):  # 50 MB of answers, more than the buffers of the sockets hold
                connection.sendall(request(input=["pond"] * 2000, encoding_format="float"))
        except OSError:
            pass
        end = time.monotonic() + 20
        while server.server_state.connections:
            assert time.monotonic() < end, "the connection is still open"
            time.sleep(0.05)


@pytest.mark.slow
def test_a_slow_reader_gets_its_whole_answer(hasty: Server) -> None:
    with connect(hasty) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.sendall(with_key(request(CLOSE, input=["pond"] * 2000, encoding_format="float")))
        received = b""
        while True:
            piece = connection.recv(1 << 16)
            if not piece:
                break
            received += piece
            if len(received) < 1 << 20:
                time.sleep(0.2)
    _, _, body = received.partition(b"\r\n\r\n")
    assert len(json.loads(body)["data"]) == 2000
