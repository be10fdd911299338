"""Cohere's and Hugging Face's clients with asyncio, many calls at once, against a server on a port."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import AsyncInferenceClient
from tests.server.conftest import running
from tests.tiny import SENTENCES

from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig

QUERY = "How deep is the mill pond?"
BATCHES = [[f"{i} {SENTENCES[(i + j) % len(SENTENCES)]}" for j in range(1 + i % 4)] for i in range(24)]


@pytest.fixture(scope="module")
def models(embedder: Path, cross_encoder: Path) -> ServedModels:
    folders = {"embedder": embedder, "reranker": cross_encoder}
    return ServedModels.load(
        [ModelConfig(model=str(path), names=(name,), dtype="float32") for name, path in folders.items()]
    )


@pytest.fixture(scope="module")
def address(models: ServedModels) -> Iterator[str]:
    with running(models) as address:
        yield address


def engine_of(models: ServedModels, name: str) -> Any:
    return models.find(name, tasks=(), api="").engine


async def test_coheres_client(models: ServedModels, address: str) -> None:
    async with httpx.AsyncClient(timeout=300) as http:
        client = cohere.AsyncClientV2(api_key="none", base_url=address, httpx_client=http)
        embedded, ranked = await asyncio.gather(
            asyncio.gather(
                *(
                    client.embed(model="embedder", input_type="search_document", texts=texts, embedding_types=["float"])
                    for texts in BATCHES
                )
            ),
            asyncio.gather(*(client.rerank(model="reranker", query=QUERY, documents=texts) for texts in BATCHES)),
        )
    for texts, vectors, ranking in zip(BATCHES, embedded, ranked, strict=True):
        expected = engine_of(models, "embedder").embed(texts).embeddings
        np.testing.assert_allclose(vectors.embeddings.float_, expected, atol=1e-6)
        order = engine_of(models, "reranker").rerank(QUERY, texts)
        assert [each.index for each in ranking.results] == [each.index for each in order]
        scores = [each.relevance_score for each in ranking.results]
        np.testing.assert_allclose(scores, [each.relevance_score for each in order], rtol=1e-5, atol=1e-5)


async def test_hugging_faces_client(models: ServedModels, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it may talk to this machine
    async with AsyncInferenceClient(model=f"{address}/embed", timeout=300) as client:
        actual = await asyncio.gather(*(client.feature_extraction(texts) for texts in BATCHES))
    for texts, vectors in zip(BATCHES, actual, strict=True):
        np.testing.assert_allclose(vectors, engine_of(models, "embedder").embed(texts).embeddings, atol=1e-6)
