"""Request bodies: what is refused, with which message, and after how many bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.wire import replies, talk

from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app
from tests.server.conftest import running

MOST = 100_000
PATH = "/v1/embeddings"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def address(embedder: Path) -> Iterator[str]:
    """A server that accepts ``MOST`` bytes and 5 inputs."""
    models = ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",))])
    with running(models, ServerConfig(max_body_bytes=MOST, max_inputs=5)) as url:
        yield url


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=300) as http:
        yield http


def error_of(found: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, checked for OpenAI's fields and strict JSON."""
    assert found.status_code == status, found.text
    assert found.headers["content-type"] == "application/json"

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    error: dict[str, Any] = json.loads(found.text, parse_constant=refuse)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


# --- Types of content -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/json ;a=b"]
)
def test_json_is_read(client: httpx.Client, kind: str) -> None:
    assert client.post(PATH, content=b'{"input": "a"}', headers={"Content-Type": kind}).status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": ""}, {"Content-Type": "text/plain"}, {"Content-Type": "application/jsonl"}]
)
def test_nothing_else_is(client: httpx.Client, headers: dict[str, str]) -> None:
    error = error_of(client.post(PATH, content=b'{"input": "a"}', headers=headers), 400)
    assert error["message"] == "Unsupported Media Type: Only 'application/json' is allowed"


def test_a_compressed_body_is_refused_by_name(client: httpx.Client) -> None:
    error = error_of(client.post(PATH, content=b"\x1f\x8b", headers={**JSON, "Content-Encoding": "gzip"}), 415)
    assert "'gzip'" in error["message"]


# --- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"input": "a"} {}',
        b'{"input": "\xff\xfe"}',
        b'{"input": "\xed\xa0\x80"}',
        b'{"input": "\\ud800"}',
        b'{"input": "a", "seed": NaN}',
        b'{"input": "a", "seed": [1, -Infinity]}',
        b'{"input": "a", "deep": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"input": "a", "deep": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"input": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"input": "a\x00b"}',
        '{"input": "a"}'.encode("utf-16"),
    ],
)
def test_what_is_no_json_is_a_bad_request(client: httpx.Client, body: bytes) -> None:
    error = error_of(client.post(PATH, content=body, headers=JSON), 400)
    assert error["message"].startswith("1 validation error: body: Invalid JSON: ")
    assert "[type=json_invalid]" in error["message"]
    assert error["type"] == "Bad Request"


# --- Shapes ---------------------------------------------------------------------------------------------------------


def test_a_wrong_value_is_named_with_its_field_and_its_kind(client: httpx.Client) -> None:
    response = client.post(PATH, json={"input": "a", "encoding_format": "octal"})
    error = error_of(response, 400)
    assert (error["type"], error["param"]) == ("Bad Request", "encoding_format")
    assert error["message"].startswith("1 validation error: encoding_format: Input should be 'float', ")
    assert error["message"].endswith("[type=literal_error, input='octal']")


def test_of_many_violations_the_first_are_told(client: httpx.Client) -> None:
    message = error_of(client.post("/v2/embed", json={"texts": [1] * 20}), 400)["message"]
    assert message.startswith("20 validation errors: texts.0: ")
    assert "texts.7: " in message and "texts.8: " not in message
    assert message.endswith("; and 12 more")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("[1, 2]", "list of 2"),
        ('{"a": 1}', "dict of 1"),
        ('"it\'s"', '"it\'s"'),
        (f'"{"x" * 101}"', f"'{'x' * 100}…'"),
        ("1e999", "a number that is not finite"),
        ("1.5", "1.5"),
    ],
)
def test_a_value_is_shown_in_few_characters(client: httpx.Client, value: str, shown: str) -> None:
    body = f'{{"input": "a", "dimensions": {value}}}'
    assert error_of(client.post(PATH, content=body, headers=JSON), 400)["message"].endswith(f", input={shown}]")


# --- Sizes ----------------------------------------------------------------------------------------------------------


def sized(size: int) -> bytes:
    head, tail = b'{"input": "a", "user": "', b'"}'
    return head + b"u" * (size - len(head) - len(tail)) + tail


def chunks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 10_000):
        yield body[start : start + 10_000]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_body_may_have_as_many_bytes_as_the_server_says(client: httpx.Client, streamed: bool) -> None:
    body = sized(MOST)
    assert client.post(PATH, content=chunks(body) if streamed else body, headers=JSON).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("size", [MOST + 1, 2 * MOST + 50_000])
def test_a_larger_body_is_refused(client: httpx.Client, size: int, streamed: bool) -> None:
    body = sized(size)
    response = client.post(PATH, content=chunks(body) if streamed else body, headers=JSON)
    error = error_of(response, 413)
    assert str(MOST) in error["message"]


def raw(address: str, head: str, body: bytes = b"") -> tuple[str, bytes]:
    """The head and the body of the answer to raw bytes, until the server closes the connection."""
    ((_, reply, rest),) = replies(talk(address, f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode() + body))
    return reply, rest


def test_a_stream_without_an_end_is_not_read_to_it(address: str) -> None:
    head = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    size = 2 * MOST + 1
    reply, _ = raw(address, head, f"{size:x}\r\n".encode() + b"x" * size)
    assert reply.startswith("http/1.1 413 ")
    assert "connection: close" in reply


def test_a_body_that_does_not_come_is_given_up(embedder: Path) -> None:
    models = ServedModels.load([ModelConfig(model=str(embedder))])
    with running(models, ServerConfig(request_timeout=0.2)) as address:
        reply, body = raw(address, "Content-Type: application/json\r\nContent-Length: 20\r\n", b'{"inp')
    assert reply.startswith("http/1.1 408 ")
    assert "connection: close" in reply
    assert "0.2 s" in json.loads(body)["error"]["message"]


# --- Many of them at once -------------------------------------------------------------------------------------------


def test_bodies_under_way_have_room_together(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.server.requests.body_budget._MIN_BYTES", 3000)  # and four of the largest bodies: 4000
    models = ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",))])
    app = create_app(models, ServerConfig(max_body_bytes=1000))
    body = json.dumps({"input": "a"}).encode().ljust(900)

    async def talk() -> None:
        first, rest = [asyncio.Event() for _ in range(4)], asyncio.Event()

        async def slow(i: int) -> AsyncIterator[bytes]:
            yield body
            first[i].set()  # asked for more, so the first part was taken
            await rest.wait()
            yield b" "

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://pond", headers=JSON) as client:
            others = [asyncio.ensure_future(client.post(PATH, content=slow(i))) for i in range(4)]
            for event in first:
                await event.wait()
            response = await client.post(PATH, content=body)
            assert "3600 bytes, and 4000 is the most" in error_of(response, 429)["message"]
            assert response.headers["retry-after"] == "1"
            assert (await client.post(PATH, json={"input": "a"})).status_code == 200  # a small one finds room
            rest.set()
            assert [(await other).status_code for other in others] == [200] * 4
            assert (await client.post(PATH, content=body)).status_code == 200
        assert app.state.body_budget.used == 0

    asyncio.run(talk())
    models.close()


# --- What takes the interpreter long --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roomy(embedder: Path) -> Iterator[httpx.Client]:
    """A client of a server with default limits."""
    models = ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",))])
    with running(models) as address, httpx.Client(base_url=address, timeout=300) as http:
        yield http


@pytest.mark.parametrize(
    "given", ["[[1]]", "[]", "[{}]", '"a\\"", []'], ids=["ids", "empty", "objects", "behind a quote"]
)
def test_lists_without_number_are_refused_before_they_are_made(roomy: httpx.Client, given: str) -> None:
    body = f'{{"input": [{", ".join([given] * 66_000)}]}}'
    error = error_of(roomy.post(PATH, content=body, headers=JSON), 400)
    assert "lists and objects; this server reads 65536" in error["message"]


@pytest.mark.parametrize("text", ["[" * 70_000, '{"a": [1]}' * 10_000, '\\" [' * 70_000], ids=["[", "json", "quotes"])
def test_a_text_may_have_any_number_of_brackets(roomy: httpx.Client, text: str) -> None:
    response = roomy.post(PATH, json={"input": [text], "truncate_prompt_tokens": 8})
    assert response.status_code == 200 and response.json()["usage"]["prompt_tokens"] == 8
