"""The faults of existing LlamaIndex adapters, each with a test that the adapters here do not have it.

Faults that have their test elsewhere: pickling and num_workers (test_ingestion), the vectors and scores of a role
(test_vectors), events without an end (test_rerank), insertion and deletion (test_chains).
"""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.storage.kvstore import SimpleKVStore
from tests.tiny.heads import DIM, QUERY_LENGTH, write_stanford
from transformers import AutoModel, AutoTokenizer

from llama_index.embeddings.millpond import MillpondEmbedding
from llama_index.postprocessor.millpond_rerank import MillpondRerank
from millpond import Engine

QUESTION = "What makes dough rise?"


def hits_of(texts: list[str]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(id_=f"node-{n}", text=text), score=0.5) for n, text in enumerate(texts)]


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny ColBERT with a projection, markers and a punctuation mask."""
    return str(write_stanford(tmp_path_factory.mktemp("colbert") / "model"))


def test_a_cache_keeps_roles_and_widths_apart(prompted: str, engine: Engine, tmp_path: Path) -> None:
    # embeddings_cache, whose key is the text, gives a query the vector of a document, and one width for another.
    fault = MillpondEmbedding(prompted, dtype="float32", embeddings_cache=SimpleKVStore())
    document = fault.get_text_embedding("tides")
    assert fault.get_query_embedding("tides") == document

    options: dict[str, Any] = {"dtype": "float32", "cache": tmp_path / "vectors.db"}
    ours = MillpondEmbedding(prompted, **options)
    expected = engine.embed(["search_document: tides", "search_query: tides"]).embeddings
    for _ in range(2):  # computed, then from the cache
        np.testing.assert_allclose(ours.get_text_embedding("tides"), expected[0], atol=1e-6)
        np.testing.assert_allclose(ours.get_query_embedding("tides"), expected[1], atol=1e-6)
    cut = MillpondEmbedding(prompted, dimensions=8, hf_overrides={"is_matryoshka": True}, **options)
    wanted = expected[0][:8] / np.linalg.norm(expected[0][:8])
    np.testing.assert_allclose(cut.get_text_embedding("tides"), wanted, atol=1e-6)


def test_one_cached_row_serves_every_width(minilm: str, tmp_path: Path, texts: list[str]) -> None:
    options: dict[str, Any] = {
        "dtype": "float32",
        "cache": tmp_path / "vectors.db",
        "hf_overrides": {"is_matryoshka": True},
    }
    MillpondEmbedding(minilm, **options).get_text_embedding_batch(texts)
    cut = MillpondEmbedding(minilm, dimensions=64, **options)
    before = cut._engine().stats()
    assert {len(vector) for vector in cut.get_text_embedding_batch(texts)} == {64}
    after = cut._engine().stats()
    assert (after.batch_texts - before.batch_texts, after.cache_hits - before.cache_hits) == (0, len(texts))


@pytest.mark.parametrize("error", [MemoryError("out of memory"), RuntimeError("device lost")], ids=["memory", "device"])
def test_an_error_comes_at_once_and_the_call_is_not_repeated(
    minilm: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    # HuggingFaceEmbedding tries three times, with seconds between, whatever the error is.
    with Engine(minilm, dtype="float32") as engine:
        embedding, calls = MillpondEmbedding(engine=engine), []
        embed = engine.embed

        def failing(texts: Any, **options: Any) -> Any:
            calls.append(list(texts))
            raise error

        monkeypatch.setattr(engine, "embed", failing)
        with pytest.raises(type(error), match=str(error)):
            embedding.get_text_embedding_batch(["tides"])
        assert calls == [["tides"]]
        monkeypatch.setattr(engine, "embed", embed)
        assert embedding.get_text_embedding("tides")


def test_a_whole_batch_is_one_call_of_the_engine(minilm: str, texts: list[str]) -> None:
    # The base class passes 10 texts at a time.
    with Engine(minilm, dtype="float32") as engine:
        MillpondEmbedding(engine=engine).get_text_embedding_batch(texts * 4)
        assert engine.stats().calls_done == 1


def test_an_event_carries_no_credentials(minilm: str) -> None:
    payload = MillpondEmbedding(minilm, hf_overrides={"secret": "hf_secret"}).to_payload()
    assert payload == {"class_name": "MillpondEmbedding", "model_name": minilm, "embed_batch_size": 2048}


@pytest.mark.parametrize("kind", ["embedder", "cross-encoder", "colbert"])
def test_a_score_belongs_to_its_node_in_any_order(
    minilm: str, cross_encoder: str, colbert: str, texts: list[str], kind: str
) -> None:
    # The rerank over TEI gives scores by position, to nodes in another order.
    model = {"embedder": minilm, "cross-encoder": cross_encoder, "colbert": colbert}[kind]
    reranker = MillpondRerank(model, top_n=None, dtype="float32")

    def scores(hits: list[NodeWithScore]) -> dict[str, float]:
        return {hit.node.node_id: hit.get_score() for hit in reranker.postprocess_nodes(hits, query_str=QUESTION)}

    hits = hits_of(texts)
    expected = scores(hits)
    alone = {hit.node.node_id: scores([hit])[hit.node.node_id] for hit in hits}
    assert scores(hits[::-1]) == pytest.approx(expected, abs=1e-4)
    assert scores(hits[5:] + hits[:5]) == pytest.approx(expected, abs=1e-4)
    assert alone == pytest.approx(expected, abs=1e-4)
    assert len(set(expected.values())) == len(texts)


def test_colbert_scores_by_projected_rows_with_markers_expansion_and_mask(colbert: str, texts: list[str]) -> None:
    found = MillpondRerank(colbert, dtype="float32", top_n=None).postprocess_nodes(hits_of(texts), query_str=QUESTION)
    scores = {hit.text: hit.get_score() for hit in found}
    with Engine(colbert, dtype="float32") as engine:
        (query,) = engine.token_embed([QUESTION], role="query").embeddings
        documents = engine.token_embed(texts, role="document").embeddings
        masked, plain = engine.token_embed(["tides, moon.", "tides moon"], role="document").embeddings
    assert query.shape == (QUERY_LENGTH, DIM)  # expanded to its length, and projected
    assert json.loads((Path(colbert) / "config.json").read_text())["hidden_size"] != DIM
    assert masked.shape == plain.shape  # punctuation has no row
    for text, document in zip(texts, documents, strict=True):
        assert document.shape[1] == DIM
        assert scores[text] == pytest.approx(float((query @ document.T).max(axis=1).sum()), abs=1e-3)  # sum, not mean


def test_colbert_scores_are_not_those_of_the_backbone(colbert: str, texts: list[str]) -> None:
    # As llama-index-postprocessor-colbert-rerank 0.6.0 computes them, from the backbone's states.
    tokenizer, model = AutoTokenizer.from_pretrained(colbert), AutoModel.from_pretrained(colbert)

    def states(text: str) -> torch.Tensor:
        with torch.no_grad():
            output = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=64))
        return torch.nn.functional.normalize(output.last_hidden_state[0], dim=-1)

    faulty = [float((states(QUESTION) @ states(text).T).max(dim=1).values.mean()) for text in texts]
    found = MillpondRerank(colbert, dtype="float32", top_n=None).postprocess_nodes(hits_of(texts), query_str=QUESTION)
    scores = {hit.text: hit.get_score() for hit in found}
    assert not np.allclose([scores[text] / QUERY_LENGTH for text in texts], faulty, atol=0.02)


def test_documents_are_read_in_batches_without_gradients(colbert: str, texts: list[str]) -> None:
    # ColbertRerank reads one document at a time, with gradients.
    with Engine(colbert, dtype="float32") as engine:
        reranker = MillpondRerank(engine=engine)
        reranker.postprocess_nodes(hits_of(texts), query_str=QUESTION)
        stats = engine.stats()
        assert stats.batch_texts == len(texts) + 1
        assert stats.batches < len(texts) / 2
        rows = engine.token_embed(texts).embeddings.flat
        assert isinstance(rows, np.ndarray)


@pytest.mark.parametrize("style", ["sync", "async"])
def test_a_rerank_changes_neither_nodes_nor_their_order(minilm: str, texts: list[str], style: str) -> None:
    # SentenceTransformerRerank and ColbertRerank write scores and metadata into the nodes that they are given.
    hits = hits_of(texts)
    before = copy.deepcopy(hits)
    reranker = MillpondRerank(minilm, keep_retrieval_score=True)
    if style == "sync":
        found = reranker.postprocess_nodes(hits, query_str=QUESTION)
    else:
        found = asyncio.run(reranker.apostprocess_nodes(hits, query_str=QUESTION))
    assert hits == before
    assert found[0].node.metadata["retrieval_score"] == 0.5


def test_a_score_of_zero_and_below_keeps_its_place(cross_encoder: str, texts: list[str]) -> None:
    # SentenceTransformerRerank sorts by ``-score if score else 0``.
    found = MillpondRerank(cross_encoder, top_n=None).postprocess_nodes(hits_of(texts), query_str=QUESTION)
    scores = [hit.get_score() for hit in found]
    assert min(scores) < 0 < max(scores)
    assert scores == sorted(scores, reverse=True)
    assert {type(score) for score in scores} == {float}
