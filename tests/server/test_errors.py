"""Errors on the wire: one object, vLLM's messages, no internal details."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request

from millpond import errors as tree
from millpond.server import ServedModels, create_app
from tests.server import conftest

Ask = Callable[..., httpx.Response]
PATH = "/v1/embeddings"


@pytest.fixture
def ask(tiny: ServedModels) -> Ask:
    """One request to an application in this process whose route ``/fail`` raises ``error``."""

    def send(method: str, path: str, error: BaseException | None = None, **options: Any) -> httpx.Response:
        app = create_app(tiny)

        @app.get("/fail")
        async def fail(request: Request, number: int = 0) -> None:
            request.state.texts, request.state.model = 1, "tiny"
            if error is not None:
                raise error

        return asyncio.run(conftest.ask(app, method, path, **options))

    return send


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (tree.InvalidRequestError("no: 5 is more than 4"), 400, "BadRequestError"),
        (tree.UnsupportedTaskError("no: 5 is more than 4"), 400, "BadRequestError"),
        (tree.InvalidDimensionsError("no: 5 is more than 4"), 400, "BadRequestError"),
        (tree.InputTooLongError("no: 5 is more than 4"), 400, "BadRequestError"),
        (tree.UnknownModelError("no: 5 is more than 4"), 404, "NotFoundError"),
        (tree.EngineOverloadedError("no: 5 is more than 4", retry_after=2.5), 429, "TooManyRequestsError"),
    ],
)
def test_what_a_client_can_mend_is_told(ask: Ask, error: Exception, status: int, kind: str) -> None:
    response = ask("GET", "/fail", error)
    details = response.json()["error"]
    assert (response.status_code, details["code"], details["type"]) == (status, status, kind)
    assert details["message"] == "no: 5 is more than 4"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("secret"),
        TypeError("secret"),
        ValueError("secret"),
        KeyError("secret"),
        OSError("/secret"),
        tree.MillpondError("secret"),
        tree.ModelLoadError("secret"),
        tree.CacheError("secret"),
        ExceptionGroup("secret", [ValueError("secret")]),
    ],
)
def test_of_anything_else_only_the_log_knows(ask: Ask, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="millpond.server.errors"):
        response = ask("GET", "/fail", error)
    assert (response.status_code, response.json()["error"]["message"]) == (
        500,
        "The server could not answer this request; its log says why.",
    )
    assert "secret" not in response.text and type(error).__name__ not in response.text
    (record,) = [record for record in caplog.records if record.name == "millpond.server.errors"]
    assert record.exc_info is not None and record.exc_info[1] is error
    assert response.headers["x-request-id"]


def test_a_retry_is_told_in_whole_seconds(ask: Ask) -> None:
    for seconds, expected in ((0.1, "1"), (1.0, "1"), (2.2, "3"), (60.0, "60")):
        response = ask("GET", "/fail", tree.EngineOverloadedError("full", retry_after=seconds))
        assert response.headers["retry-after"] == expected


def test_the_folder_of_a_model_stays_inside(ask: Ask, embedder: Path) -> None:
    response = ask("GET", "/fail", tree.UnsupportedTaskError(f"{embedder} serves embed, not classify"))
    assert response.json()["error"]["message"] == "tiny serves embed, not classify"


@pytest.mark.parametrize(("method", "path"), [("GET", "/nowhere"), ("POST", "/v1/embedding"), ("GET", "/v1/models/no")])
def test_an_unknown_path_is_404(ask: Ask, method: str, path: str) -> None:
    response = ask(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, 404)
    assert response.json()["error"]["type"] in ("Not Found", "NotFoundError")


def test_a_bad_query_is_400_and_never_422(ask: Ask) -> None:
    response = ask("GET", "/fail?number=many")
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("1 validation error: query.number: ")


# --- vLLM's words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("texts", "where"), [(1, ""), (2, " It is the one at index 0.")])
def test_an_input_that_is_too_long_by_far(ask: Ask, texts: int, where: str) -> None:
    error = ask("POST", PATH, json={"input": ["a " * 200_000] * texts}).json()["error"]
    assert error["message"].startswith(
        "This model's maximum context length is 64 tokens. However, your prompt contains at least "
    )
    assert error["message"].endswith("Please reduce the length of the input prompt." + where)
    assert (error["param"], error["code"]) == ("input_tokens", 400)
    cut = {"input": ["a " * 200_000] * texts, "truncate_prompt_tokens": -1}
    assert ask("POST", PATH, json=cut).json()["usage"]["prompt_tokens"] == 64 * texts


def test_a_text_of_which_every_token_is_made_has_its_limit(ask: Ask) -> None:
    error = ask("POST", PATH, json={"input": "a " * 1_100_000, "add_special_tokens": False}).json()["error"]
    assert error["message"].startswith("a text has 2200000 characters; 2097152 are the most")
