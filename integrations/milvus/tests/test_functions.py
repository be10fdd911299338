"""The functions shaped like those of pymilvus.model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.tiny.heads import write_cross_encoder

from millpond import Engine, InvalidRequestError, UnsupportedTaskError
from millpond.errors import InvalidDimensionsError
from millpond_milvus import MillpondEmbeddingFunction, MillpondRerankFunction

pytestmark = pytest.mark.contract

TEXTS = ["Bread rises because of yeast.", "Tides follow the moon.", "ä \U0001f35e"]


def test_texts_are_embedded_as_the_engine_embeds_them(engine: Engine) -> None:
    with MillpondEmbeddingFunction(engine) as embed:
        assert embed.dim == 384
        for call, role in ((embed, None), (embed.encode_documents, "document"), (embed.encode_queries, "query")):
            vectors = call(TEXTS)
            expected = engine.embed(TEXTS, role=role, normalize=True).embeddings  # type: ignore[arg-type]
            assert isinstance(vectors, list) and len(vectors) == 3
            assert all(vector.shape == (384,) and vector.dtype == np.float32 for vector in vectors)
            assert np.allclose(np.stack(vectors), expected, atol=1e-6)
        assert embed([]) == [] and embed.encode_queries(()) == []
        with pytest.raises(TypeError, match="not a str"):
            embed("a text")
    assert len(engine.embed(["still open"])) == 1  # the caller's engine


def test_a_smaller_width_is_cut_and_normalized(engine: Engine) -> None:
    embed = MillpondEmbeddingFunction(engine, dimensions=64)
    assert embed.dim == 64
    (vector,) = embed.encode_documents(["text"])
    assert vector.shape == (64,) and np.isclose(np.linalg.norm(vector), 1, atol=1e-5)
    with pytest.raises(InvalidDimensionsError):
        MillpondEmbeddingFunction(engine, dimensions=4096)


def test_a_model_that_is_named_is_opened_and_closed(minilm: str) -> None:
    with MillpondEmbeddingFunction(minilm, dtype="float32", device="cpu") as embed:
        assert embed.dim == 384 and len(embed(["text"])) == 1
        engine = embed.engine
    with pytest.raises(Exception, match="closed"):
        engine.embed(["text"])


def test_documents_are_ranked_as_the_engine_ranks_them(tmp_path: Path, engine: Engine) -> None:
    write_cross_encoder(tmp_path)
    with Engine(tmp_path, dtype="float32", device="cpu") as cross_encoder:
        rank = MillpondRerankFunction(cross_encoder)
        documents = [*TEXTS, TEXTS[0]]
        results = rank("What makes dough rise?", documents, top_k=3)
        expected = cross_encoder.rerank("What makes dough rise?", documents, top_n=3)
        assert [(each.index, each.text) for each in results] == [(each.index, each.document) for each in expected]
        assert [each.score for each in results] == pytest.approx([each.relevance_score for each in expected])
        assert results[0].to_dict() == {"text": results[0].text, "score": results[0].score, "index": results[0].index}
        assert len(rank("q", TEXTS)) == 3 and rank("q", [], top_k=2) == []
        for wrong in (0, True, "3"):
            with pytest.raises(InvalidRequestError, match="top_"):
                rank("q", TEXTS, top_k=wrong)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedTaskError, match="embed"):
            MillpondEmbeddingFunction(cross_encoder)(TEXTS)
    with MillpondRerankFunction(engine) as rank:  # an embedder compares tokens
        assert rank("What makes dough rise?", TEXTS, top_k=1)[0].index == 0


@pytest.mark.parametrize("kind", [MillpondEmbeddingFunction, MillpondRerankFunction])
def test_what_is_no_engine_is_refused(kind: type, engine: Engine) -> None:
    with pytest.raises(TypeError):
        kind(7)
    with pytest.raises(InvalidRequestError, match="dtype is an option of a model; pass its name"):
        kind(engine, dtype="float32")
