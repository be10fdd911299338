"""Invalid HTTP: every message is answered or its connection closed, and the next request is served."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.server.wire import chunks, connect, statuses, talk

from millpond import Engine
from millpond.server import ModelConfig, ServedModels, ServerConfig
from tests.server.conftest import running

MOST = 1 << 16  # bytes of a body
BODY = b'{"input": "How deep is the mill pond?"}'
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: pond\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: pond\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: pond\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def models(embedder: Path) -> ServedModels:
    return ServedModels.load([ModelConfig(model=str(embedder), names=("embedder",), dtype="float32")])


@pytest.fixture(scope="module")
def address(models: ServedModels) -> Iterator[str]:
    with running(models, ServerConfig(max_body_bytes=MOST)) as address:
        yield address


@pytest.fixture(scope="module")
def engine(models: ServedModels) -> Engine:
    return next(iter(models)).engine


@pytest.fixture(scope="module", autouse=True)
def other_clients_are_served(address: str, engine: Engine) -> Iterator[None]:
    """After whatever the tests sent, a request gets its vector, and nothing is queued."""
    yield
    still_well(address, engine)


def still_well(address: str, engine: Engine) -> None:
    answer = httpx.post(f"{address}/v1/embeddings", content=BODY, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    expected = engine.embed([json.loads(BODY)["input"]]).embeddings
    np.testing.assert_allclose([answer.json()["data"][0]["embedding"]], expected, atol=1e-6)
    assert engine.stats().waiting_texts == 0


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Exceptions in the log, which a client must not be able to fill."""
    return [record.getMessage() for record in caplog.records if record.exc_info]


def sized(body: bytes, *, head: bytes = POST, said: int | None = None) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % (len(body) if said is None else said) + body


TRAILED = chunks(BODY) + b"0\r\nX: y\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "expected_statuses"),
    [
        pytest.param([sized(BODY)], [200], id="as it should be"),
        pytest.param([POST + chunks(BODY, b"")], [200], id="chunked"),
        pytest.param([POST + chunks(BODY[:9], b""), GET], [400, 200], id="half of a body in chunks"),
        pytest.param([sized(BODY) + GET + sized(b"{") + GET], [200, 200, 400, 200], id="several in one piece"),
        pytest.param([sized(b" " * (MOST + 1)), GET], [413, 200], id="too large"),
        pytest.param([POST + chunks(*[b" " * 999] * 99, b""), GET], [413, 200], id="too large, in chunks"),
        pytest.param([POST + b"Expect: 100-continue\r\n" + chunks(BODY, b"")], [100, 200], id="asking first"),
        pytest.param([GET.replace(b"/health", b"http://pond/health")], [200], id="the whole URL"),
        pytest.param([GET.replace(b"/health", b"/page/..%2fapp.py")], [404], id="a way out of the page"),
        pytest.param([GET.replace(b"GET", b"DELETE")], [405], id="another method"),
        pytest.param([POST + TRAILED], [200], id="trailers"),
        pytest.param(
            [POST + TRAILED.replace(b"X: y", b"Host: b\r\nAuthorization: c")], [200], id="headers in trailers"
        ),
        pytest.param([POST + b"Transfer-Encoding: chunked\r\n\r\n0;a=b\r\n\r\n"], [400], id="an extension"),
        pytest.param(
            [sized(b'{"inputs": "a"}', head=POST.replace(b"v1/embeddings", b"embed?model=%ff"))],
            [404],
            id="no such model",
        ),
    ],
)
def test_what_is_odd_and_allowed(address: str, parts: list[bytes], expected_statuses: list[int]) -> None:
    reply = talk(address, *parts, LAST)
    assert statuses(reply) == [*expected_statuses, 200], reply


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([sized(BODY, said=len(BODY) - 9)], id="more than it says"),
        pytest.param([sized(BODY, said=len(BODY) + 9)], id="less than it says"),
        pytest.param([sized(BODY, said=10**30)], id="a length of thirty digits"),
        pytest.param([POST + b"Content-Length: 5\r\n" + chunks(BODY, b"")], id="a length, and chunks"),
        pytest.param([POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY], id="a chunk of no size"),
        pytest.param([POST + chunks(BODY)], id="chunks without an end"),
        pytest.param([POST[:30]], id="half a head"),
        pytest.param([b"\r\n" * 999], id="empty lines"),
        pytest.param([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256))], id="TLS"),
        pytest.param([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], id="HTTP/2"),
        pytest.param([GET.replace(b"Host: pond", b"X-Request-Id: a\x7fb")], id="a control character in a header"),
        pytest.param([GET.replace(b"/health", b"/hea lth")], id="a space in the path"),
        pytest.param([POST + chunks(BODY) + b"0\r\nContent-Length: 5\r\n\r\n"], id="a length in a trailer"),
        pytest.param([POST + b"Content-Length: 5\r\n\r\n"], id="a length and no body"),
        pytest.param([GET.replace(b"pond", b"p on d")], id="a host with spaces"),
    ],
)
def test_what_is_wrong(address: str, parts: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    """May be answered or not, but never with a 500; nothing stays open or queued, and other clients are served."""
    reply = talk(address, *parts, leave=True)
    assert all(100 <= status < 500 for status in statuses(reply)), reply
    assert failures(caplog) == []


@pytest.mark.parametrize(
    "part",
    [sized(BODY), sized(BODY, said=len(BODY) + 9), POST + chunks(BODY), b"\x16\x03\x01", GET[:-2] + b"X" * 99_999],
    ids=["as it should be", "less than it says", "chunks without an end", "TLS", "a long header"],
)
def test_who_leaves_without_reading_harms_nobody(
    address: str, engine: Engine, part: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(address) as connection, contextlib.suppress(OSError):
        connection.sendall(part)
    still_well(address, engine)
    assert failures(caplog) == []


def bent(count: int) -> Iterator[list[bytes]]:
    """Valid requests with changed bytes, split into parts anywhere; deterministic."""
    requests = (sized(BODY), POST + chunks(BODY[:7], BODY[7:], b""), POST + TRAILED, GET, sized(BODY) + GET)
    for number in range(count):
        chance = random.Random(number)
        message = bytearray(chance.choice(requests))
        for _ in range(chance.choice((0, 1, 2, 8))):
            at = chance.randrange(len(message))
            kind = chance.randrange(4)
            if kind == 0:
                message[at] ^= 1 << chance.randrange(8)
            elif kind == 1:
                del message[at : at + chance.randint(1, 20)]
            elif kind == 2:
                message[at:at] = chance.choice((b"\r\n", b"\r\n\r\n", b"\x00", b": ", chance.randbytes(5), b"0\r\n"))
            else:
                message[at:at] = message[at : at + 40]
            if not message:
                break
        cuts = sorted(chance.sample(range(len(message) + 1), min(3, len(message))))
        yield [bytes(message[i:j]) for i, j in zip([0, *cuts], [*cuts, len(message)], strict=True)]


@pytest.mark.parametrize("count", [50, pytest.param(5000, marks=pytest.mark.slow)])
def test_bent_requests(address: str, count: int, caplog: pytest.LogCaptureFixture) -> None:
    seen: set[int] = set()
    for parts in bent(count):
        reply = talk(address, *parts, LAST, leave=True)
        codes = statuses(reply)
        assert all(status < 500 for status in codes), (parts, reply)
        seen.update(codes)
    assert {200, 400} <= seen
    assert failures(caplog) == []
