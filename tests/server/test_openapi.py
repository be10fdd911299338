"""/openapi.json: every failure is described, and which operations ask for a key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from millpond.server import ServedModels, ServerConfig, create_app
from tests.server.conftest import ask


def document(models: ServedModels, config: ServerConfig | None = None) -> dict[str, Any]:
    """The document from the server."""
    found: dict[str, Any] = asyncio.run(ask(create_app(models, config), "GET", "/openapi.json")).json()
    return found


def operations(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_failure_is_described_and_none_is_fastapi_s(tiny: ServedModels) -> None:
    for path, method, operation in operations(document(tiny)):
        text = path.startswith("/api/") and method == "post"  # Ollama's clients read a text
        failure = {"$ref": f"#/components/schemas/{'Text' if text else ''}ErrorAnswer"}
        assert "422" not in operation["responses"], path
        expected = (
            {"400", "404", "413", "429", "500", "503", "504"} if method == "post" and path != "/ping" else {"default"}
        )
        assert expected <= operation["responses"].keys(), path
        for status in expected:
            assert operation["responses"][status]["content"]["application/json"]["schema"] == failure, (path, status)


def test_only_guarded_operations_ask_for_a_key(tiny: ServedModels) -> None:
    assert "securitySchemes" not in document(tiny)["components"]
    doc = document(tiny, ServerConfig(api_keys=("key",)))
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
