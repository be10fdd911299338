"""The faults of existing LlamaIndex adapters, each with a test that the adapters here do not have it.

Faults that have their test elsewhere: pickling and num_workers (test_ingestion), the vectors and scores of a role
(test_vectors), events without an end (test_rerank), insertion and deletion (test_chains).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.schema import NodeWithScore, TextNode
from tests.tiny.heads import DIM, QUERY_LENGTH, write_stanford

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


def test_a_score_of_zero_and_below_keeps_its_place(cross_encoder: str, texts: list[str]) -> None:
    # SentenceTransformerRerank sorts by ``-score if score else 0``.
    found = MillpondRerank(cross_encoder, top_n=None).postprocess_nodes(hits_of(texts), query_str=QUESTION)
    scores = [hit.get_score() for hit in found]
    assert min(scores) < 0 < max(scores)
    assert scores == sorted(scores, reverse=True)
    assert {type(score) for score in scores} == {float}
