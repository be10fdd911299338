"""RequestMiddleware: keys, ids, CORS and the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from millpond.server import ServedModels, ServerConfig, create_app
from tests.server import conftest

Ask = Callable[..., httpx.Response]
KEYS = ("first-key", "zweiter-schlüssel")
OPEN = ("/", "/docs", "/health", "/metrics", "/openapi.json", "/page/index.html", "/ping", "/ready", "/version")


@pytest.fixture
def ask(tiny: ServedModels) -> Ask:
    """One request to an application in this process."""
    return lambda method, path, config=None, **options: asyncio.run(
        conftest.ask(create_app(tiny, config), method, path, **options)
    )


def bearer(key: str, scheme: str = "Bearer") -> dict[str, bytes]:
    return {"Authorization": f"{scheme} {key}".encode()}


# --- Keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_any_of_the_keys_opens_a_call(ask: Ask, key: str, scheme: str) -> None:
    config = ServerConfig(api_keys=KEYS)
    response = ask("POST", "/v1/embeddings", config, json={"input": "a"}, headers=bearer(key, scheme))
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("first-key "[:-2]),
        bearer("first-keyx"),
        bearer("first-key", "Basic"),
        {"Authorization": "first-key"},
        {"Authorization": "Bearer"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/embeddings"), ("GET", "/v1/models"), ("POST", "/"), ("GET", "/no")]
)
def test_without_a_key_nothing_is_answered(ask: Ask, headers: Any, method: str, path: str) -> None:
    response = ask(method, path, ServerConfig(api_keys=KEYS), headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("Unauthorized", 401)
    assert "Authorization: Bearer KEY" in error["message"]
    assert not any(key in response.text for key in KEYS)


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        (b"Bearer first-key", True),
        (b"Bearer    first-key", True),  # RFC 9110, section 11.4: one or more spaces
        (b" \tBearer first-key\t ", True),  # whitespace around a value is no part of it
        (b"Bearer\tfirst-key", False),  # a tab is no space
        (b"Bearer \tfirst-key", False),
        (b"Bearer\xa0first-key", False),
        (b"Bearerfirst-key", False),
        (b"Bearer first-key first-key", False),
        (b"Bearer first-key,Bearer first-key", False),
        (b'Bearer "first-key"', False),
    ],
)
def test_a_key_is_separated_from_its_scheme_by_spaces(ask: Ask, value: bytes, accepted: bool) -> None:
    response = ask("GET", "/v1/models", ServerConfig(api_keys=KEYS), headers=[(b"Authorization", value)])
    assert response.status_code == (200 if accepted else 401)


@pytest.mark.parametrize("other", [b"Bearer wrong", b"Bearer first-key", b""])
def test_two_authorization_headers_are_none(ask: Ask, other: bytes) -> None:
    for values in ([b"Bearer first-key", other], [other, b"Bearer first-key"]):
        headers = [(b"Authorization", value) for value in values]
        assert ask("GET", "/v1/models", ServerConfig(api_keys=KEYS), headers=headers).status_code == 401


@pytest.mark.parametrize("path", OPEN)
def test_what_an_orchestrator_or_a_browser_asks_for_is_open(ask: Ask, path: str) -> None:
    assert ask("GET", path, ServerConfig(api_keys=KEYS)).status_code == 200


@pytest.mark.parametrize(
    ("root", "path", "status"),
    [
        *(("", path, 401) for path in ("/health/", "/pages/x", "/page", "/HEALTH", "/stats", "/load")),
        ("", "/v1/models", 401),
        ("/pond", "/pond/v1/models", 401),
        ("/pond", "/pond/health", 200),
        ("/pond", "/ponder/health", 401),
        ("/pond", "/health", 200),
    ],
)
def test_a_path_that_looks_alike_is_guarded(ask: Ask, root: str, path: str, status: int) -> None:
    """Keys are checked for the path that the router sees."""
    assert ask("GET", path, ServerConfig(api_keys=KEYS, root_path=root)).status_code == status


# --- Request ids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "expected"),
    [("abc-123_X.y:z/+=@", "abc-123_X.y:z/+=@"), ("a\nb\r{c}\x1b[0m <d>", "abc0md"), ("x" * 500, "x" * 128)],
)
def test_a_request_id_is_kept_as_far_as_it_is_harmless(ask: Ask, header: str, expected: str) -> None:
    assert ask("GET", "/health", headers={"X-Request-Id": header}).headers["x-request-id"] == expected


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/nowhere", 404), ("/v1/models", 401)])
def test_every_answer_has_the_id(ask: Ask, path: str, status: int) -> None:
    config = ServerConfig(api_keys=KEYS)
    headers = {"X-Request-Id": "mine", **({} if status == 401 else bearer(KEYS[0]))}
    response = ask("GET", path, config, headers=headers)
    assert (response.status_code, response.headers.get_list("x-request-id")) == (status, ["mine"])


# --- CORS -----------------------------------------------------------------------------------------------------------


def test_browsers_of_configured_origins_are(ask: Ask) -> None:
    config = ServerConfig(cors_origins=("https://app.example",), api_keys=KEYS)
    origin = {"Origin": "https://app.example"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    before = ask("OPTIONS", "/v1/embeddings", config, headers={**origin, **asked})
    assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, "https://app.example")
    refused = ask("POST", "/v1/embeddings", config, headers=origin)  # without a key, which the browser is to be told
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")
    for settings in (config, None):
        other = ask("GET", "/health", settings, headers={"Origin": "https://elsewhere.example"})
        assert "access-control-allow-origin" not in other.headers


# --- The log --------------------------------------------------------------------------------------------------------


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """The records logged from now on."""
    caplog.set_level(logging.INFO, logger="millpond")
    captured: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = captured.append  # type: ignore[method-assign]  # as a handler may
    logging.getLogger("millpond").addHandler(handler)
    yield captured
    logging.getLogger("millpond").removeHandler(handler)


def lines(records: list[logging.LogRecord], style: str) -> list[str]:
    formatter = conftest.Formatter(style)
    return [formatter.format(record) for record in records if record.name == "millpond.access"]


def test_a_request_is_one_line_without_its_text_and_its_key(ask: Ask, records: list[logging.LogRecord]) -> None:
    config = ServerConfig(api_keys=KEYS)
    headers = {"X-Request-Id": "r-1", **bearer(KEYS[0])}
    response = ask("POST", "/v1/embeddings?q=whisper", config, json={"input": ["secret words"]}, headers=headers)
    (line,) = lines(records, "json")
    fields = json.loads(line)
    assert fields["milliseconds"] > 0
    assert {key: fields[key] for key in ("request_id", "method", "route", "model", "status", "tokens", "level")} == {
        "request_id": "r-1",
        "method": "POST",
        "route": "/v1/embeddings",
        "model": "tiny",
        "status": 200,
        "tokens": response.json()["usage"]["prompt_tokens"],
        "level": "info",
    }
    (text,) = lines(records, "plain")
    assert "[r-1] " in text and "route=/v1/embeddings" in text and "status=200" in text
    everything = " ".join(record.getMessage() for record in records) + line + text
    for private in ("secret", "whisper", KEYS[0]):
        assert private not in everything


def test_the_log_can_be_switched_off(ask: Ask, records: list[logging.LogRecord]) -> None:
    ask("GET", "/health", ServerConfig(log_requests=False))
    assert lines(records, "json") == []


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        ("unable to perform operation on <TCPTransport closed=True>; the handler is closed", True),  # uvloop's
        ("Response content longer than Content-Length", False),  # uvicorn's
    ],
)
async def test_an_answer_that_nobody_can_be_given_is_no_failure(
    tiny: ServedModels, records: list[logging.LogRecord], words: str, gone: bool
) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        raise RuntimeError(words)

    scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": []}
    answer = create_app(tiny)(scope, receive, send)
    if gone:
        await answer
    else:
        with pytest.raises(RuntimeError, match=words):
            await answer
    (line,) = lines(records, "json")
    assert json.loads(line)["status"] == (499 if gone else 200)
    assert [record for record in records if record.exc_info] == ([] if gone else [records[0]])
