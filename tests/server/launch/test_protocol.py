"""HttpProtocol: offers of other protocols, and request heads without an end."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from tests.server.conftest import address_of, serving

from millpond.server.app import create_app
from millpond.server.models import ServedModels
from millpond.server.settings.config import ModelConfig

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
CLOSE = b"Connection: close\r\n"


@pytest.fixture(scope="module")
def server(embedder: Path) -> Iterator[uvicorn.Server]:
    with serving(create_app(ServedModels.load([ModelConfig(model=str(embedder), names=("pond",))]))) as server:
        yield server


def request(more: bytes = b"", **body: Any) -> bytes:
    content = json.dumps(body or {"input": "The pond."}).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    return head % len(content) + more + b"\r\n" + content


def answers(server: uvicorn.Server, *parts: bytes, last: bool = True) -> list[tuple[int, bytes]]:
    """The status and the body of each answer."""
    address = urlsplit(address_of(server))
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    replies = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None
        replies.append((int(head.split()[1]), received[: int(length[1])]))
        received = received[int(length[1]) :]
    return replies


@pytest.mark.parametrize("offer", [OFFER, OFFER.lower(), b"upgrade: TLS/1.2, h2c\r\nConnection: upgrade\r\n"])
def test_an_offer_of_another_protocol_is_passed_over(server: uvicorn.Server, offer: bytes) -> None:
    # As Java's client has it: the offer with every request, the body behind it.
    (first, vector), (second, _) = answers(server, request(offer), request(CLOSE))
    assert (first, second) == (200, 200)
    assert len(json.loads(vector)["data"]) == 1


def test_an_offer_whose_body_comes_later(server: uvicorn.Server) -> None:
    head, end, body = request(OFFER).partition(b"\r\n\r\n")
    assert [status for status, _ in answers(server, head + end, body[:5], body[5:] + request(CLOSE))] == [200, 200]


def test_a_websocket_is_a_request_like_any_other(server: uvicorn.Server) -> None:
    upgrade = b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n"
    head = b"GET /v1/models HTTP/1.1\r\nHost: pond\r\nConnection: Upgrade, close\r\n" + upgrade + b"\r\n"
    ((status, body),) = answers(server, head)
    assert status == 200 and json.loads(body)["data"][0]["id"] == "pond"


def test_a_text_may_speak_of_upgrades(server: uvicorn.Server) -> None:
    replies = answers(server, request(input="x\r\nUpgrade: h2c\r\n\r\nUpgrade: h2c\r\n"), request(CLOSE))
    assert [status for status, _ in replies] == [200, 200]


def test_a_head_without_an_end_is_refused(server: uvicorn.Server) -> None:
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


def test_the_refusal_is_an_error_like_any_other(server: uvicorn.Server) -> None:
    ((status, body),) = answers(server, b"GET /health HTTP/1.1\r\nHost: pond\r\n", b"X: " + b"x" * 66_000)
    assert status == 431
    assert json.loads(body)["error"]["type"] == "Request Header Fields Too Large"
    ((status, body),) = answers(server, b"What is this?\r\n\r\n")
    assert status == 400
    assert json.loads(body)["error"]["message"] == "Invalid HTTP request received."


def test_many_requests_on_one_connection_are_no_long_head(server: uvicorn.Server) -> None:
    many = request(input="pond " * 3000, truncate_prompt_tokens=8) * 12
    assert [status for status, _ in answers(server, many + request(CLOSE))] == [200] * 13


def test_a_large_body_is_no_part_of_the_head_behind_it(server: uvicorn.Server) -> None:
    many = request(input="pond " * 30_000, truncate_prompt_tokens=8) * 3
    last = request(CLOSE)
    assert [status for status, _ in answers(server, many + last[:30], last[30:])] == [200] * 4


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"], ids=["nothing", "half a head"])
def test_who_does_not_come_to_the_point_is_not_waited_for(embedder: Path, sent: bytes) -> None:
    app = create_app(ServedModels.load([ModelConfig(model=str(embedder))]))
    with serving(app, keep_alive=1) as server:
        assert answers(server, sent) == []
