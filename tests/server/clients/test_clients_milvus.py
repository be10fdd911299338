"""Milvus Lite's functions with a server on a port: it embeds inserted texts and queries, and reranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.conftest import running
from tests.tiny import SENTENCES

from millpond import Engine
from millpond.server import ModelConfig, ServedModels, ServerConfig

pytestmark = pytest.mark.contract

pymilvus = pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")

QUERY = "How deep is the mill pond?"
TEXTS = list(SENTENCES[:8])
KEY = "a-key"


@pytest.fixture(scope="module")
def models(embedder: Path, cross_encoder: Path) -> ServedModels:
    return ServedModels.load(
        [
            ModelConfig(
                model=str(embedder), names=("mill/vectors",), dtype="float32", hf_overrides={"is_matryoshka": True}
            ),
            ModelConfig(model=str(cross_encoder), names=("mill/ranks",), dtype="float32"),
        ]
    )


@pytest.fixture(scope="module")
def address(models: ServedModels) -> Iterator[str]:
    with running(models, ServerConfig(api_keys=(KEY,))) as address:
        yield address


def engine_of(models: ServedModels, name: str) -> Engine:
    return models.find(name, tasks=(), api="").engine


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    path = str(tmp_path / "pond.db")
    client = pymilvus.MilvusClient(path)
    yield client
    client.close()


def collect(client: Any, address: str, *, width: int = 16, model: str = "mill/vectors", key: str = KEY) -> None:
    """A collection whose vectors come from the server."""
    schema = client.create_schema(auto_id=False)
    schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
    schema.add_field("text", pymilvus.DataType.VARCHAR, max_length=1000)
    schema.add_field("vector", pymilvus.DataType.FLOAT_VECTOR, dim=width)
    function = pymilvus.Function(
        name="embed",
        function_type=pymilvus.FunctionType.TEXTEMBEDDING,
        input_field_names=["text"],
        output_field_names=["vector"],
        params={
            "provider": "openai",
            "model_name": model,
            "api_key": key,
            "dimensions": width,
            "base_url": f"{address}/v1",
        },
    )
    schema.add_function(function)
    index = client.prepare_index_params()
    index.add_index("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection("pond", schema=schema, index_params=index)
    client.load_collection("pond")


def ranker(address: str, *, key: str = KEY) -> Any:
    return pymilvus.Function(
        name="rank",
        function_type=pymilvus.FunctionType.RERANK,
        input_field_names=["text"],
        params={
            "reranker": "model",
            "provider": "cohere",
            "queries": [QUERY],
            "base_url": f"{address}/v2",
            "api_key": key,
            "model_name": "mill/ranks",
        },
    )


def test_it_embeds_what_is_inserted_and_what_is_asked(client: Any, models: ServedModels, address: str) -> None:
    collect(client, address)
    client.insert("pond", [{"id": i, "text": text} for i, text in enumerate(TEXTS)])
    embed = engine_of(models, "mill/vectors").embed
    rows = embed(TEXTS, dimensions=16).embeddings
    stored = client.query("pond", filter="id >= 0", output_fields=["id", "vector"])
    for each in stored:
        np.testing.assert_allclose(each["vector"], rows[each["id"]], atol=1e-6)
    assert len(stored) == len(TEXTS)
    (hits,) = client.search("pond", data=[QUERY], anns_field="vector", limit=4, output_fields=["text"])
    scores = rows @ embed([QUERY], dimensions=16).embeddings[0]
    best = np.argsort(-scores, kind="stable")[:4]
    assert [hit["entity"]["text"] for hit in hits] == [TEXTS[i] for i in best]
    assert [hit["distance"] for hit in hits] == pytest.approx(scores[best].tolist(), abs=1e-5)


def test_it_reranks_what_it_found(client: Any, models: ServedModels, address: str) -> None:
    collect(client, address)
    client.insert("pond", [{"id": i, "text": text} for i, text in enumerate(TEXTS)])
    (hits,) = client.search(
        "pond", data=[QUERY], anns_field="vector", limit=len(TEXTS), output_fields=["text"], ranker=ranker(address)
    )
    expected = engine_of(models, "mill/ranks").rerank(QUERY, TEXTS)
    assert [hit["entity"]["text"] for hit in hits] == [each.document for each in expected]
    scores = [each.relevance_score for each in expected]
    assert [hit["distance"] for hit in hits] == pytest.approx(scores, abs=1e-5)
