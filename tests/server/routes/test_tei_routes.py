"""TEI's own routes over the engine's results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.tiny import Layout, Pooling, write_checkpoint

from millpond.server.app import create_app
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig

TEXTS = ["The mill stands by the pond.", "A wheel turns."]
LONG = "The wheel of the mill turns in the water of the pond. " * 20


@pytest.fixture(scope="module")
def models(
    cross_encoder: Path,
    colbert: Path,
    classifier: Path,
    sparse_embedder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServedModels]:
    layout = Layout(modules=(Pooling(),), prompts={"query": "question: ", "document": ""}, default_prompt_name="query")
    embedder = write_checkpoint(tmp_path_factory.mktemp("tei") / "embedder", "bert", sentence_transformers=layout)
    folders = {
        "embedder": embedder,
        "reranker": cross_encoder,
        "colbert": colbert,
        "classifier": classifier,
        "sparse": sparse_embedder,
    }
    served = ServedModels.load(
        [
            ModelConfig(
                model=str(path),
                names=(name,),
                dtype="float32",
                hf_overrides={"is_matryoshka": True} if name == "embedder" else {},
            )
            for name, path in folders.items()
        ]
    )
    yield served
    served.close()


async def send(
    models: ServedModels, path: str, body: Any = None, config: ServerConfig | None = None, **headers: str
) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(models, config), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://millpond", headers=headers) as client:
        return await (client.get(path) if body is None else client.post(path, json=body))


def engine_of(models: ServedModels, name: str) -> Any:
    return models.find(name, tasks=(), api="").engine


def only(models: ServedModels, *names: str) -> ServedModels:
    return ServedModels([models.find(name, tasks=(), api="") for name in names])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"normalize": True, "prompt": ""}),
        ({"normalize": False}, {"normalize": False, "prompt": ""}),
        ({"prompt_name": "query"}, {"normalize": True, "prompt_name": "query"}),
        ({"dimensions": 16}, {"normalize": True, "prompt": "", "dimensions": 16}),
        ({"truncate": True, "truncation_direction": "Left"}, {"normalize": True, "prompt": "", "truncate": "start"}),
        ({"truncate": None, "truncation_direction": "right"}, {"normalize": True, "prompt": "", "truncate": "end"}),
    ],
)
async def test_embed(models: ServedModels, options: dict[str, Any], expected: dict[str, Any]) -> None:
    texts = [*TEXTS, LONG + "flour"]
    response = await send(models, "/embed", {"inputs": texts, **options})
    assert response.status_code == 200, response.text
    np.testing.assert_allclose(
        response.json(), engine_of(models, "embedder").embed(texts, **expected).embeddings, atol=1e-6
    )


async def test_one_text_and_token_ids(models: ServedModels) -> None:
    engine = engine_of(models, "embedder")
    expected = engine.embed(TEXTS, prompt="", normalize=True).embeddings
    ids = engine.tokenize(TEXTS)
    for inputs, rows in (
        (TEXTS[0], expected[:1]),
        (ids[0], expected[:1]),
        (ids, expected),
        ([ids[0], TEXTS[1]], expected),
    ):
        np.testing.assert_allclose((await send(models, "/embed", {"inputs": inputs})).json(), rows, atol=1e-6)


async def test_embed_all(models: ServedModels) -> None:
    some = only(models, "embedder")
    response = await send(some, "/embed_all", {"inputs": TEXTS})
    expected = engine_of(models, "embedder").token_embed(TEXTS, prompt="", normalize=False).embeddings
    assert len(response.json()) == 2
    for mine, matrix in zip(response.json(), expected, strict=True):
        np.testing.assert_allclose(mine, matrix, atol=1e-5)
    late = await send(only(models, "colbert"), "/embed_all", {"inputs": TEXTS[0]})
    (matrix,) = engine_of(models, "colbert").token_embed(TEXTS[:1]).embeddings
    np.testing.assert_allclose(late.json()[0], matrix, atol=1e-6)


async def test_embed_sparse(models: ServedModels) -> None:
    response = await send(models, "/embed_sparse", {"inputs": TEXTS})
    assert response.status_code == 200, response.text
    expected = engine_of(models, "sparse").sparse_embed(TEXTS)
    for mine, weights in zip(response.json(), expected, strict=True):
        found = {each["index"]: each["value"] for each in mine}
        assert [each["index"] for each in mine] == sorted(found)
        assert found == pytest.approx(weights, abs=1e-6)
        assert found


async def test_similarity(models: ServedModels) -> None:
    inputs = {"source_sentence": TEXTS[0], "sentences": [TEXTS[1], TEXTS[0]]}
    response = await send(models, "/similarity", {"inputs": inputs})
    rows = engine_of(models, "embedder").embed(TEXTS, prompt="", normalize=True).embeddings
    np.testing.assert_allclose(response.json(), [rows[0] @ rows[1], 1.0], atol=1e-6)
    prompted = {"inputs": inputs, "parameters": {"prompt_name": "query"}}
    rows = engine_of(models, "embedder").embed(TEXTS, prompt_name="query", normalize=True).embeddings
    np.testing.assert_allclose((await send(models, "/similarity", prompted)).json(), [rows[0] @ rows[1], 1], atol=1e-6)


def by_label(answer: list[dict[str, Any]]) -> dict[str, float]:
    scores = [each["score"] for each in answer]
    assert scores == sorted(scores, reverse=True)
    return {each["label"]: each["score"] for each in answer}


async def test_predict(models: ServedModels) -> None:
    some, engine = only(models, "classifier", "embedder"), engine_of(models, "classifier")
    probs = [dict(zip(engine.spec.labels, row.tolist(), strict=True)) for row in engine.classify(TEXTS).probs]
    for inputs in (TEXTS[0], [TEXTS[0]]):
        alone = await send(some, "/predict", {"inputs": inputs})
        assert by_label(alone.json()) == pytest.approx(probs[0], abs=1e-6)
    batch = await send(some, "/predict", {"inputs": [[TEXTS[0]], [TEXTS[1]]]})
    assert [by_label(each) for each in batch.json()] == [pytest.approx(each, abs=1e-6) for each in probs]
    raw = await send(some, "/predict", {"inputs": TEXTS[0], "raw_scores": True})
    logits = engine.classify(TEXTS[:1], activation=False).probs[0]
    assert by_label(raw.json()) == pytest.approx(dict(zip(engine.spec.labels, logits.tolist(), strict=True)), abs=1e-6)


async def test_predict_reads_pairs(models: ServedModels) -> None:
    pair = ["How deep is it?", "Two metres."]
    scores = await send(models, "/predict", {"inputs": pair, "model": "reranker"})
    (expected,) = engine_of(models, "reranker").score(*[[text] for text in pair], activation="sigmoid").scores
    assert [each["score"] for each in scores.json()] == pytest.approx([expected], abs=1e-6)
    several = await send(models, "/predict", {"inputs": [pair, ["alone"]], "model": "classifier"})
    assert several.status_code == 200, several.text
    engine = engine_of(models, "classifier")
    as_one, alone = (by_label(each) for each in several.json())
    ids = engine.tokenizer(*pair)
    assert 0 < sum(ids["token_type_ids"]) < len(ids["input_ids"])
    whole = engine.classify([" ".join(pair), "alone"]).probs
    assert alone == pytest.approx(dict(zip(engine.spec.labels, whole[1].tolist(), strict=True)), abs=1e-6)
    assert as_one != pytest.approx(dict(zip(engine.spec.labels, whole[0].tolist(), strict=True)), abs=1e-4)


async def test_pipeline_parameters(models: ServedModels) -> None:
    body = {"inputs": TEXTS[0], "model": "classifier", "parameters": {"top_k": 2, "function_to_apply": "sigmoid"}}
    (answer,) = (await send(models, "/predict", body)).json()
    (probs,) = engine_of(models, "classifier").classify(TEXTS[:1], activation="sigmoid").probs
    assert [each["score"] for each in answer] == pytest.approx(sorted(probs.tolist(), reverse=True)[:2], abs=1e-6)


@pytest.mark.parametrize("name", ["embedder", "reranker", "classifier", "sparse"])
async def test_info(models: ServedModels, name: str) -> None:
    answer = (await send(models, f"/info?model={name}", config=ServerConfig(max_inputs=32))).json()
    kind = {"embedder": "embedding", "sparse": "embedding", "reranker": "reranker", "classifier": "classifier"}[name]
    assert set(answer["model_type"]) == {kind}
    assert answer["model_id"] == name
    assert answer["model_dtype"] == "float32"
    assert answer["max_input_length"] == 64
    assert answer["max_client_batch_size"] == 32
    assert answer["max_batch_tokens"] == engine_of(models, name).max_batch_tokens
    assert answer["served_models"] == ["embedder", "reranker", "colbert", "classifier", "sparse"]
    if name == "classifier":
        assert answer["model_type"]["classifier"]["id2label"] == {"0": "level_0", "1": "level_1", "2": "level_2"}


async def test_the_shortest_route_does_what_the_model_is_for(models: ServedModels) -> None:
    embedded = await send(only(models, "embedder"), "/", {"inputs": TEXTS})
    np.testing.assert_allclose(
        embedded.json(), engine_of(models, "embedder").embed(TEXTS, prompt="", normalize=True).embeddings, atol=1e-6
    )
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    compared = await send(only(models, "embedder"), "/", {"inputs": inputs})
    np.testing.assert_allclose(
        compared.json(), (await send(models, "/similarity", {"inputs": inputs})).json(), atol=1e-6
    )
    assert len((await send(only(models, "classifier"), "/", {"inputs": "a"})).json()) == 3
    assert "index" in (await send(only(models, "reranker"), "/", {"query": "a", "texts": ["b"]})).json()[0]
    assert "value" in (await send(only(models, "sparse"), "/", {"inputs": "a pond"})).json()[0][0]


async def test_the_shortest_route_is_guarded_and_the_page_is_not(models: ServedModels) -> None:
    config, body = ServerConfig(api_keys=("secret",)), {"inputs": "a"}
    some = only(models, "embedder")
    assert (await send(some, "/", body, config)).status_code == 401
    assert (await send(some, "/", body, config, authorization="Bearer secret")).status_code == 200
    assert (await send(some, "/", config=config)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/embed", {"inputs": LONG, "truncate": False}, 400, "token"),
        ("/embed", {"inputs": []}, 400, "at least one prompt"),
        ("/embed", {"inputs": [[]]}, 400, "index 0"),
        ("/embed", {"inputs": [10**6]}, 400, "index 0"),
        ("/embed", {"inputs": {"a": 1}}, 400, "inputs"),
        ("/embed", {}, 400, "inputs"),
        ("/embed", {"inputs": "a", "prompt_name": "other"}, 400, "other"),
        ("/embed", {"inputs": [1, 2], "prompt_name": "query"}, 400, "token ids at index 0"),
        ("/embed", {"inputs": "a", "dimensions": 100}, 400, "100"),
        ("/embed", {"inputs": "a", "truncation_direction": "Up"}, 400, "truncation_direction"),
        ("/embed", {"inputs": "a", "model": "reranker"}, 501, "The model does not support Embed API"),
        ("/embed_sparse", {"inputs": "a", "model": "embedder"}, 501, "Embed Sparse API"),
        ("/embed_all", {"inputs": "a"}, 400, "several models serve"),
        ("/predict", {"inputs": ["a", "b", "c"], "model": "classifier"}, 400, "list of 3 texts"),
        ("/predict", {"inputs": [["a"], []], "model": "classifier"}, 400, "inputs at index 1"),
        ("/predict", {"inputs": [], "model": "classifier"}, 400, "empty list"),
        ("/predict", {"inputs": "a", "model": "embedder"}, 501, "Predict API"),
        ("/predict", {"inputs": LONG, "model": "classifier", "truncate": False}, 400, "token"),
        ("/embed_all", {"inputs": ["a", LONG], "model": "colbert", "truncate": False}, 400, "at index 1"),
        ("/rerank", {"query": "a", "texts": ["a", LONG], "model": "colbert", "truncate": False}, 400, "at index 1"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "empty list"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["a", LONG]}, "parameters": {"truncate": False}},
            400,
            "at index 1",
        ),
        ("/similarity", {"inputs": "a"}, 400, "inputs"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    models: ServedModels, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    response = await send(models, path, body)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]
