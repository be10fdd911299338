"""The calls of a lone caller run in the event loop's thread, and nobody else's."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import Request

from millpond.server import ModelConfig, ServedModels
from millpond.server.requests import lone_caller
from millpond.server.requests.lone_caller import LoneCaller
from millpond.server.requests.prepare_executor import PrepareExecutor
from tests.server.conftest import running


def test_after_eight_calls_no_thread_is_asked(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lone_caller, "_SECONDS", math.inf)
    submit, handed = PrepareExecutor.submit, []

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        handed.append(args)
        return submit(self, *args, **options)

    monkeypatch.setattr(PrepareExecutor, "submit", counted)
    models = ServedModels.load([ModelConfig(model=str(embedder), device="cpu", dtype="float32")])
    with running(models) as address, httpx.Client(base_url=address) as one, httpx.Client(base_url=address) as other:

        def threads(client: httpx.Client, **fields: Any) -> int:
            handed.clear()
            response = client.post("/v1/embeddings", json={"input": "a wheel turns", **fields})
            assert response.status_code == 200
            assert int(response.headers["x-compute-tokens"]) == response.json()["usage"]["prompt_tokens"]
            vectors.add(tuple(response.json()["data"][0]["embedding"]))
            return len(handed)

        vectors: set[tuple[float, ...]] = set()
        assert [threads(one) for _ in range(10)] == [1] * 8 + [0] * 2
        assert threads(one, input=["a wheel turns"] * 2) == 1
        assert (threads(other), threads(one)) == (1, 1)
        assert len(vectors) == 1


def comes(lone: LoneCaller, **changes: Any) -> bool:
    """Whether a call may run in the event loop's thread, if only the ``changes`` might speak against it."""
    facts = {"client": ("h", 1), "in_flight": 1, "bytes": 512, "path": "/embed", "model": "tiny", **changes}
    app = SimpleNamespace(state=SimpleNamespace(metrics=SimpleNamespace(in_flight=facts["in_flight"])))
    scope = {"type": "http", "app": app, "client": facts["client"], "path": facts["path"]}
    return lone.comes(Request({**scope, "state": {"body_bytes": facts["bytes"]}}), facts["model"])


def after_eight_calls(**changes: Any) -> LoneCaller:
    lone = LoneCaller()
    for _ in range(8):
        assert not comes(lone, **changes)
        lone.ran(0.0)
    return lone


@pytest.mark.parametrize(
    "change",
    [{"client": ("h", 2)}, {"path": "/rerank"}, {"model": "large"}, {"in_flight": 2}, {"bytes": 513}],
    ids=str,
)
def test_another_call_is_handed_to_a_thread(change: dict[str, Any]) -> None:
    lone = after_eight_calls()
    assert comes(lone)
    assert not comes(lone, **change)


@pytest.mark.parametrize("client", [None, ("h", 0)])
def test_whose_connection_is_not_known_is_not_alone(client: Any) -> None:
    """X-Forwarded-For names a host, which may have any number of connections."""
    assert not comes(after_eight_calls(client=client), client=client)


def test_a_slow_call_ends_it() -> None:
    lone = after_eight_calls()
    lone.ran(1.0)
    assert not comes(lone)
