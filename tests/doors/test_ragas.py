"""Ragas' metrics that need embeddings alone: scores are those of Ragas' own class over sentence-transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from ragas.dataset_schema import SingleTurnSample
from ragas.embeddings import HuggingFaceEmbeddings, LangchainEmbeddingsWrapper
from ragas.embeddings.base import embedding_factory
from ragas.metrics import SemanticSimilarity as OlderSimilarity
from ragas.metrics.collections import SemanticSimilarity
from tests.adapter_models import prompted as prompted
from tests.adapters import write_prompted
from tests.gates import LoopGate, batches_through
from tests.passages import TEXTS
from tests.tiny import edit_json

from langchain_millpond import MillpondEmbeddings as LangchainEmbeddings
from millpond.compat.ragas import MillpondEmbeddings
from millpond.server import ModelConfig, ServedModels
from tests.server.conftest import running

pytestmark = [pytest.mark.door, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PAIRS = [*pairwise(TEXTS), ("", TEXTS[0])]


def scores(embeddings: Any) -> list[float]:
    metric = SemanticSimilarity(embeddings=embeddings)
    return [metric.score(reference=reference, response=response).value for reference, response in PAIRS]


def test_scores_are_those_of_sentence_transformers(minilm: str) -> None:
    expected = scores(HuggingFaceEmbeddings(minilm, device="cpu"))
    assert scores(MillpondEmbeddings(minilm, dtype="float32")) == pytest.approx(expected, abs=1e-5)
    cls = scores(MillpondEmbeddings(minilm, dtype="float32", pooling="cls"))
    assert np.abs(np.subtract(cls, expected)).max() > 1e-2  # the negative control


def test_prompts_are_those_of_sentence_transformers(prompted: str, minilm: str, tmp_path: Any) -> None:
    """The prompts of roles are left out, and the default prompt is read, as ``SentenceTransformer.encode`` does."""
    default = write_prompted(tmp_path / "default", minilm)
    edit_json(default / "config_sentence_transformers.json", default_prompt_name="query")
    for model in (prompted, str(default)):
        expected = HuggingFaceEmbeddings(model, device="cpu").embed_texts(TEXTS)
        vectors = MillpondEmbeddings(model, dtype="float32").embed_texts(TEXTS)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        own = MillpondEmbeddings(model, dtype="float32", document_prompt="passage: ").embed_texts(TEXTS)
        assert np.abs(np.subtract(own, expected)).max() > 1e-2


def test_every_method_gives_the_same(minilm: str, engine_of: Any) -> None:
    embeddings, expected = MillpondEmbeddings(minilm, dtype="float32"), engine_of("minilm").embed(TEXTS).embeddings
    found = [
        [embeddings.embed_text(text) for text in TEXTS],
        embeddings.embed_texts(TEXTS),
        asyncio.run(embeddings.aembed_texts(TEXTS)),
        [asyncio.run(embeddings.aembed_text(text)) for text in TEXTS],
    ]
    for vectors in found:
        np.testing.assert_allclose(vectors, expected, atol=1e-6)
    results = SemanticSimilarity(embeddings=embeddings).batch_score(
        [{"reference": one, "response": other} for one, other in PAIRS]
    )
    assert [result.value for result in results] == pytest.approx(scores(embeddings), abs=1e-6)


def test_the_loop_goes_on_while_a_text_is_embedded(engine_of: Any) -> None:
    engine, gate = engine_of("minilm"), LoopGate()
    with batches_through(gate, engine):
        assert len(asyncio.run(gate.run(MillpondEmbeddings(engine=engine).aembed_text("tides")))) == 384
    assert gate.calls and not gate.blocked


def test_mistakes_are_named(minilm: str) -> None:
    for options, message in (
        ({}, "either model= .* or engine="),
        ({"model": minilm, "backend": "onnx"}, "backend='onnx' is not available here"),
        ({"model": minilm, "cache": object()}, "cache"),
    ):
        with pytest.raises(ValueError, match=message):
            MillpondEmbeddings(**options)
    with pytest.raises(ValueError, match="index 1 is a NoneType"):
        MillpondEmbeddings(minilm).embed_texts(["a", None])


def test_the_older_metrics_take_langchains_class(minilm: str) -> None:
    wrapped = LangchainEmbeddingsWrapper(LangchainEmbeddings(model=minilm, dtype="float32"))
    metric = OlderSimilarity(embeddings=wrapped)
    found = [
        metric.single_turn_score(SingleTurnSample(reference=reference, response=response))
        for reference, response in PAIRS[:3]
    ]
    assert found == pytest.approx(scores(MillpondEmbeddings(minilm, dtype="float32"))[:3], abs=1e-5)
    with pytest.raises(ValueError, match="only support modern embeddings"):
        SemanticSimilarity(embeddings=wrapped)


@pytest.fixture
def address(minilm: str) -> Iterator[str]:
    with running(
        ServedModels.load([ModelConfig(model=minilm, names=("minilm",), device="cpu", dtype="float32")])
    ) as address:
        yield address


def test_the_server_is_asked_by_ragas_own_class(address: str, minilm: str) -> None:
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none")
    served = embedding_factory("openai", model="minilm", client=client)
    vectors = served.embed_texts(TEXTS)
    np.testing.assert_allclose(vectors, MillpondEmbeddings(minilm, dtype="float32").embed_texts(TEXTS), atol=1e-6)
