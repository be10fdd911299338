"""``/v2/embed`` and ``/v1/embed``: Cohere's format around the engine's vectors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.tiny import Layout, Normalize, Pooling, write_checkpoint

from millpond.server.app import create_app
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig

TEXTS = ["The mill stands by the pond.", "A wheel turns.", "flour"]
LONG = "The wheel of the mill turns in the water of the pond. " * 20
PROMPTS = {"query": "question: ", "passage": "text: ", "Clustering": "cluster: ", "special": "special: "}


@pytest.fixture(scope="module")
def models(embedder: Path, cross_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModels]:
    layout = Layout(modules=(Pooling(), Normalize()), prompts=PROMPTS, default_prompt_name="passage")
    prompted = write_checkpoint(tmp_path_factory.mktemp("cohere") / "prompted", "bert", sentence_transformers=layout)
    wide = {"is_matryoshka": True}
    served = ServedModels.load(
        [
            ModelConfig(model=str(embedder), names=("embedder",), dtype="float32", hf_overrides=wide),
            ModelConfig(model=str(prompted), names=("prompted",), dtype="float32"),
            ModelConfig(model=str(cross_encoder), names=("reranker",), dtype="float32"),
        ]
    )
    yield served
    served.close()


async def post(models: ServedModels, path: str, body: Any, config: ServerConfig | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(models, config), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://millpond") as client:
        return await client.post(path, json=body)


def engine_of(models: ServedModels, name: str) -> Any:
    return models.find(name, tasks=(), api="").engine


def floats(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return np.array(response.json()["embeddings"]["float"])


async def test_the_vectors_are_the_engines(models: ServedModels) -> None:
    response = await post(models, "/v2/embed", {"model": "embedder", "texts": TEXTS, "input_type": "search_document"})
    expected = engine_of(models, "embedder").embed(TEXTS)
    np.testing.assert_allclose(floats(response), expected.embeddings, atol=1e-6)
    answer = response.json()
    assert answer["texts"] == TEXTS
    assert answer["response_type"] == "embeddings_by_type"
    assert set(answer["embeddings"]) == {"float"}
    assert answer["meta"]["billed_units"]["input_tokens"] == expected.usage.prompt_tokens
    assert answer["meta"]["api_version"] == {"version": "2"}


async def test_inputs_are_texts_in_parts(models: ServedModels) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    response = await post(models, "/v2/embed", {"model": "embedder", "inputs": inputs})
    np.testing.assert_allclose(floats(response), engine_of(models, "embedder").embed(TEXTS).embeddings, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3])
async def test_every_type_is_of_the_same_vectors(models: ServedModels, count: int) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"model": "embedder", "texts": TEXTS[:count], "embedding_types": types}
    response = await post(models, "/v2/embed", body)
    rows = floats(response).astype(np.float32)
    by_type = response.json()["embeddings"]
    assert set(by_type) == set(types)
    expected = engine_of(models, "embedder")
    for name in ("binary", "ubinary"):
        assert by_type[name] == expected.embed(TEXTS[:count], output_dtype=name).embeddings.tolist()
    decoded = [np.frombuffer(base64.b64decode(each), "<f4") for each in by_type["base64"]]
    np.testing.assert_allclose(np.stack(decoded), rows, atol=1e-6)
    codes = np.array(by_type["int8"])
    assert np.abs(codes).max(axis=1).tolist() == [127] * count
    np.testing.assert_array_equal(np.array(by_type["uint8"]), codes + 128)
    cosines = (codes * rows).sum(axis=1) / np.linalg.norm(codes, axis=1) / np.linalg.norm(rows, axis=1)
    assert (cosines > 0.999).all()


async def test_codes_do_not_depend_on_the_batch(models: ServedModels) -> None:
    body = {"model": "embedder", "embedding_types": ["int8"]}
    together = (await post(models, "/v2/embed", {**body, "texts": TEXTS})).json()["embeddings"]["int8"]
    alone = (await post(models, "/v2/embed", {**body, "texts": TEXTS[1:2]})).json()["embeddings"]["int8"]
    np.testing.assert_allclose(alone[0], together[1], atol=1)  # a rounding may fall either way


@pytest.mark.parametrize(
    ("input_type", "options"),
    [
        (None, {"prompt": ""}),
        ("search_query", {"role": "query"}),
        ("search_document", {"role": "document"}),
        ("classification", {"prompt": ""}),
        ("clustering", {"prompt_name": "Clustering"}),
        ("special", {"prompt_name": "special"}),
        ("passage", {"prompt_name": "passage"}),
    ],
)
async def test_input_types_are_the_checkpoints_prompts(
    models: ServedModels, input_type: str | None, options: dict[str, str]
) -> None:
    response = await post(models, "/v2/embed", {"model": "prompted", "texts": TEXTS, "input_type": input_type})
    engine = engine_of(models, "prompted")
    np.testing.assert_allclose(floats(response), engine.embed(TEXTS, **options).embeddings, atol=1e-6)
    bare = engine.embed(TEXTS, prompt="").embeddings
    assert np.allclose(floats(response), bare, atol=1e-4) is (options == {"prompt": ""})


async def test_the_width_is_the_callers(models: ServedModels) -> None:
    body = {"texts": TEXTS, "output_dimension": 16}
    response = await post(models, "/v2/embed", {**body, "model": "embedder"})
    expected = engine_of(models, "embedder").embed(TEXTS, dimensions=16)
    np.testing.assert_allclose(floats(response), expected.embeddings, atol=1e-6)
    refused = await post(models, "/v2/embed", {**body, "model": "prompted"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "output_dimension"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"truncate": "end"}),
        ({"truncate": "END"}, {"truncate": "end"}),
        ({"truncate": None, "priority": None, "max_tokens": None}, {"truncate": "end"}),
        ({"truncate": "START"}, {"truncate": "start"}),
        ({"max_tokens": 9}, {"truncate": "end", "truncate_prompt_tokens": 9}),
        ({"max_tokens": 9, "truncate": "START"}, {"truncate": "start", "truncate_prompt_tokens": 9}),
        ({"max_tokens": 4096}, {"truncate": "end"}),
    ],
)
async def test_over_long_texts_are_cut(models: ServedModels, options: Any, expected: Any) -> None:
    from millpond import PoolingParams

    text = LONG + " flour"
    response = await post(models, "/v2/embed", {"model": "embedder", "texts": [text], **options})
    output = engine_of(models, "embedder").encode([text], task="embed", params=PoolingParams(**expected))
    np.testing.assert_allclose(floats(response), output.embeddings, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"texts": [LONG], "truncate": "NONE"}, "maximum context length is 64"),
        ({"texts": TEXTS, "truncate": "NONE", "max_tokens": 4}, "maximum context length is 4"),
        ({"texts": []}, "at least one text"),
        ({"inputs": []}, "at least one text"),
        ({}, "exactly one of texts and inputs"),
        ({"texts": TEXTS, "inputs": [{"content": "a"}]}, "exactly one of texts and inputs"),
        ({"images": ["data:image/png;base64,AA=="]}, "images are not embedded"),
        ({"inputs": [{"content": "a"}, {"content": [{"type": "image_url"}]}]}, "image at index 1"),
        ({"inputs": [{"content": "a"}, {"contents": "b"}]}, "index 1"),
        ({"inputs": [{"content": [{"type": ["text"], "text": "a"}]}]}, "index 0"),
        ({"texts": TEXTS, "input_type": "image"}, "Unsupported input_type 'image'"),
        ({"texts": TEXTS, "embedding_types": ["float", "int4"]}, "embedding_types"),
        ({"texts": TEXTS, "truncate": "MIDDLE"}, "truncate"),
        ({"texts": TEXTS, "max_tokens": 0}, "max_tokens"),
        ({"texts": [1]}, "texts"),
        ({"texts": TEXTS, "output_dimension": 0}, "dimension"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(models: ServedModels, body: dict[str, Any], message: str) -> None:
    response = await post(models, "/v2/embed", {"model": "embedder", **body})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


async def test_which_model_is_meant(models: ServedModels) -> None:
    assert (await post(models, "/v2/embed", {"texts": TEXTS})).status_code == 400
    assert (await post(models, "/v2/embed", {"texts": TEXTS, "model": "reranker"})).status_code == 501
    assert (await post(models, "/v2/embed", {"texts": TEXTS, "model": "other"})).status_code == 404
    alone = ServedModels([models.find(name, tasks=(), api="") for name in ("embedder", "reranker")])
    assert (await post(alone, "/v2/embed", {"texts": TEXTS})).status_code == 200
    refused = await post(alone, "/v2/embed", {"texts": TEXTS}, ServerConfig(max_inputs=2))
    assert "3 texts in one request" in refused.json()["error"]["message"]


async def test_the_first_version_gives_bare_vectors_unless_types_are_asked_for(models: ServedModels) -> None:
    expected = engine_of(models, "embedder").embed(TEXTS).embeddings
    for left_out in ({}, {"embedding_types": None}, {"embedding_types": []}):
        bare = (await post(models, "/v1/embed", {"model": "embedder", "texts": TEXTS, **left_out})).json()
        np.testing.assert_allclose(bare["embeddings"], expected, atol=1e-6)
        assert bare["response_type"] == "embeddings_floats"
    body = {"model": "embedder", "texts": TEXTS, "embedding_types": ["float"]}
    np.testing.assert_allclose(floats(await post(models, "/v1/embed", body)), expected, atol=1e-6)
