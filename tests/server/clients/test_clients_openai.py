"""OpenAI's own client, with and without asyncio, against a server on a port."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.tiny import SENTENCES

from millpond import Engine
from millpond.server import ModelConfig, ServedModels, ServerConfig
from tests.server.conftest import running, until

pytestmark = pytest.mark.contract

TEXTS = list(SENTENCES[:4])
LONG = " ".join(SENTENCES)
KEY = "sk-of-the-mill"
PATIENCE = 300.0  # seconds; whatever takes longer has failed


@pytest.fixture(scope="module")
def models(embedder: Path, classifier: Path) -> ServedModels:
    return ServedModels.load(
        [
            ModelConfig(model=str(embedder), names=("mill/plain",), dtype="float32"),
            ModelConfig(
                model=str(embedder), names=("cut",), dtype="float32", hf_overrides={"matryoshka_dimensions": [8, 24]}
            ),
            ModelConfig(model=str(classifier), names=("classes",), dtype="float32"),
        ]
    )


@pytest.fixture(scope="module")
def address(models: ServedModels) -> Iterator[str]:
    with running(models, ServerConfig(api_keys=(KEY,))) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def engine(models: ServedModels) -> Engine:
    return models.find("mill/plain", tasks=(), api="").engine


def vectors(answer: openai.types.CreateEmbeddingResponse) -> Any:
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return np.array([each.embedding for each in answer.data], dtype=np.float32)


# --- Vectors --------------------------------------------------------------------------------------------------------


def test_it_asks_for_base64_and_gets_the_engines_vectors(client: openai.OpenAI, engine: Engine) -> None:
    raw = client.embeddings.with_raw_response.create(model="mill/plain", input=TEXTS)
    assert all(isinstance(each["embedding"], str) for each in raw.http_response.json()["data"])
    answer, expected = raw.parse(), engine.embed(TEXTS)
    np.testing.assert_allclose(vectors(answer), expected.embeddings, atol=1e-6)
    assert answer.model == "mill/plain"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == expected.usage.prompt_tokens


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_the_encodings_that_it_may_name(client: openai.OpenAI, engine: Engine, encoding: Any) -> None:
    answer = client.embeddings.create(model="mill/plain", input=TEXTS, encoding_format=encoding)
    expected = engine.embed(TEXTS).embeddings
    if encoding == "float":
        return np.testing.assert_allclose(vectors(answer), expected, atol=1e-6)
    for each, row in zip(answer.data, expected, strict=True):  # asked for by name, base64 stays what it is
        assert isinstance(each.embedding, str)
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(each.embedding), dtype="<f4"), row, atol=1e-6)


def test_what_openai_does_not_know_goes_into_the_extra_body(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.embeddings.create(model="mill/plain", input=LONG, extra_body={"truncate_prompt_tokens": -1})
    np.testing.assert_allclose(vectors(answer), engine.embed([LONG]).embeddings, atol=1e-6)
    assert answer.usage.prompt_tokens == 64


# --- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "status", "message", "param"),
    [
        ({"input": LONG}, openai.BadRequestError, 400, "maximum context length is 64 tokens", "input_tokens"),
        ({"input": ["a", LONG]}, openai.BadRequestError, 400, "one at index 1", "input_tokens"),
        ({"dimensions": 8}, openai.BadRequestError, 400, "does not support Matryoshka", "dimensions"),
        ({"model": "cut", "dimensions": 9}, openai.BadRequestError, 400, "[8, 24], got 9", "dimensions"),
        ({"model": "gpt-4"}, openai.NotFoundError, 404, "The model `gpt-4` does not exist.", None),
        ({"model": "classes"}, openai.InternalServerError, 501, "does not support Embeddings API", None),
    ],
)
def test_refusals_are_the_clients_own_exceptions(
    client: openai.OpenAI, options: dict[str, Any], kind: type[Exception], status: int, message: str, param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        client.embeddings.create(**{"model": "mill/plain", "input": "a", **options})
    error = caught.value
    assert isinstance(error, openai.APIStatusError)
    assert type(error) is kind
    assert (error.status_code, error.param) == (status, param)
    assert message in error.message
    assert error.request_id == error.response.headers["x-request-id"]


# --- A server that has too much to do -------------------------------------------------------------------------------


@pytest.fixture
def busy(held: Any) -> Iterator[tuple[str, Any]]:
    """A server with room for two waiting texts, and its model."""
    pond = held(max_queue=2)
    with running(pond.models) as address:
        yield address, pond
        pond.release()


def test_the_client_comes_back_when_there_is_room(busy: tuple[str, Any]) -> None:
    address, pond = busy
    engine = pond.engine
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=5, timeout=PATIENCE) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        waiting = engine.submit("embed", ["a", "b"])
        answer = threads.submit(client.embeddings.create, model="tiny", input="c")
        until(lambda: engine.stats().calls_rejected > 0)
        pond.release()
        waiting.result(PATIENCE)
        actual = vectors(answer.result(PATIENCE))
    np.testing.assert_allclose(actual, engine.embed(["c"]).embeddings, atol=1e-6)


async def test_what_a_client_does_not_wait_for_is_dropped(busy: tuple[str, Any]) -> None:
    address, pond = busy
    engine = pond.engine
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        task = asyncio.create_task(client.embeddings.create(model="tiny", input=["a", "b"]))
        await asyncio.to_thread(until, lambda: engine.stats().waiting_texts == 2)
        task.cancel()
        await asyncio.to_thread(until, lambda: engine.stats().waiting_texts == 0)  # though nothing ran
    assert engine.stats().calls_cancelled == 1
