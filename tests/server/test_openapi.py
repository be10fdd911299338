"""/openapi.json: every body and every answer is described, and every reference resolves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, create_model

from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app
from millpond.server.api import openapi


@pytest.fixture(scope="module")
def models(embedder: Path) -> Iterator[ServedModels]:
    loaded = ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",))])
    yield loaded
    loaded.close()


def document(models: ServedModels, config: ServerConfig | None = None) -> dict[str, Any]:
    """The document from the server."""

    async def once() -> dict[str, Any]:
        transport = httpx.ASGITransport(create_app(models, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://pond") as client:
            answer: dict[str, Any] = (await client.get("/openapi.json")).json()
            return answer

    return asyncio.run(once())


def operations(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for part in value.values():
            yield from references(part)
    elif isinstance(value, list):
        for part in value:
            yield from references(part)


def test_every_reference_leads_somewhere(models: ServedModels) -> None:
    doc = document(models)
    assert doc["openapi"].startswith("3.1")
    expected = set(references(doc))
    assert "#/components/schemas/ErrorAnswer" in expected
    assert expected <= {f"#/components/schemas/{name}" for name in doc["components"]["schemas"]}


def test_every_body_is_described(models: ServedModels) -> None:
    doc = document(models)
    posted = {path for path, method, _ in operations(doc) if method == "post"} - {"/ping"}
    assert "/v1/embeddings" in posted
    for path in posted:
        operation = doc["paths"][path]["post"]
        assert operation["requestBody"]["required"] is True, path
        assert operation["requestBody"]["content"]["application/json"]["schema"], path
        assert operation["responses"]["200"]["content"], path


def test_every_failure_is_described_and_none_is_fastapi_s(models: ServedModels) -> None:
    failure = {"$ref": "#/components/schemas/ErrorAnswer"}
    for path, method, operation in operations(document(models)):
        assert "422" not in operation["responses"], path
        expected = (
            {"400", "404", "413", "429", "500", "503", "504"} if method == "post" and path != "/ping" else {"default"}
        )
        assert expected <= operation["responses"].keys(), path
        for status in expected:
            assert operation["responses"][status]["content"]["application/json"]["schema"] == failure, (path, status)


def test_only_guarded_operations_ask_for_a_key(models: ServedModels) -> None:
    assert "securitySchemes" not in document(models)["components"]
    doc = document(models, ServerConfig(api_keys=("key",)))
    assert doc["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    asking = {
        (method, path) for path, method, operation in operations(doc) if operation.get("security") == [{"key": []}]
    }
    assert {("post", "/v1/embeddings"), ("get", "/v1/models"), ("get", "/load")} <= asking
    assert not asking & {
        ("get", "/health"),
        ("get", "/ready"),
        ("post", "/ping"),
        ("get", "/version"),
        ("get", "/metrics"),
    }


class Inner(BaseModel):
    x: int


class Thing(BaseModel):
    inner: Inner | None = None


class Other(BaseModel):
    things: list[Thing]


def described(*bodies_of: Any) -> dict[str, Any]:
    app = FastAPI()
    for i, extra in enumerate(bodies_of):

        @app.post(f"/{i}", openapi_extra=extra)
        async def route(request: Request) -> None: ...

    return openapi.describe(app, key_required=lambda method, path: False)()


def test_schemas_go_where_they_are_referred_to() -> None:
    doc = described(
        openapi.operation(Thing, answer=list[list[float]], binary=True, description="Rows."),
        openapi.operation(Thing | Other, answer=Other),
    )
    assert {"Thing", "Inner", "Other", "ErrorAnswer", "ErrorDetail"} <= doc["components"]["schemas"].keys()
    one, two = (doc["paths"][f"/{i}"]["post"] for i in range(2))
    assert one["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Thing"}
    answer = one["responses"]["200"]
    assert answer["description"] == "Rows."
    assert answer["content"]["application/json"]["schema"]["items"] == {"items": {"type": "number"}, "type": "array"}
    assert answer["content"]["application/octet-stream"]["schema"] == {"type": "string", "format": "binary"}
    assert "application/octet-stream" not in two["responses"]["200"]["content"]
    assert two["requestBody"]["content"]["application/json"]["schema"]["anyOf"] == [
        {"$ref": "#/components/schemas/Thing"},
        {"$ref": "#/components/schemas/Other"},
    ]
    assert not any(key.startswith("x-") for key in one)


def test_two_schemas_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="called Thing"):
        described(openapi.operation(Thing), openapi.operation(create_model("Thing", y=(int, 0))))
