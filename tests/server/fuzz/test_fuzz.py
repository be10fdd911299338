"""Mutated requests to every route: each is answered, no answer is a 500, and every refusal is an error object."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.server.mutations import BODIES, KEY, MODELS, Mutant, mutants, template_of

from millpond.server import ServedModels

PATIENCE = 300.0  # seconds; whatever takes longer hangs
# 501 is vLLM's word for a model that does not serve the route; a 404 names a model, a 415 a Content-Encoding.
REFUSALS = {400, 404, 413, 415, 501}
INTERNALS = ("Traceback", "site-packages", "millpond/src", " object at 0x", "<class '", "<function ", ".py:")


@pytest.fixture
def client(every: tuple[ServedModels, str]) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=every[1], timeout=PATIENCE, trust_env=False, headers=headers) as client:
        yield client


def send(client: httpx.Client, mutant: Mutant) -> httpx.Response:
    headers = {name: value.encode("utf-8") for name, value in mutant.headers.items()}
    return client.post(mutant.path, content=mutant.body, headers=headers)


def check(answer: httpx.Response, mutant: Mutant, secret: str) -> None:
    description = f"{mutant.path} {mutant.headers} {mutant.body[:2000]!r} -> {answer.status_code} {answer.text[:2000]}"
    assert answer.headers["x-request-id"], description
    if answer.status_code == 200:
        if answer.headers["content-type"] != "application/octet-stream":
            json.loads(answer.content)
        return
    assert answer.status_code in REFUSALS, description
    assert answer.headers["content-type"] == "application/json", description
    (error,) = json.loads(answer.content).values()
    assert not any(part in answer.text for part in (*INTERNALS, secret)), description
    if mutant.path.startswith("/api/"):
        assert isinstance(error, str) and 0 < len(error) <= 2001, description
        return
    assert error.keys() == {"message", "type", "param", "code"}, description
    assert error["code"] == answer.status_code, description
    assert error["message"] and isinstance(error["message"], str) and isinstance(error["type"], str), description
    assert len(error["message"]) <= 2001, description
    assert error["param"] is None or isinstance(error["param"], str), description


def test_every_route_has_bodies_that_it_answers(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()["paths"]
    assert {path for path, description in described.items() if "post" in description} | {"/"} == {
        template_of(path.partition("?")[0]) for path in BODIES
    }
    for path, bodies in BODIES.items():
        for body in bodies:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, (path, body, answer.text)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("count", [12, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutants(
    every: tuple[ServedModels, str], client: httpx.Client, path: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    models, _ = every
    secret = str(Path(next(iter(models)).root).parent.parent)
    statuses: Counter[int] = Counter()
    for mutant in mutants(path, count):
        answer = send(client, mutant)
        check(answer, mutant, secret)
        statuses[answer.status_code] += 1
    assert path == "/ping" or (statuses[200] > count / 20 and statuses[400] > count / 5), statuses
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert {model.name: model.engine.stats().waiting_texts for model in models} == dict.fromkeys(MODELS, 0)
    assert client.get("/health").status_code == 200
