"""The reranker in LanceDB's own searches: by vectors, by words, and by both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.embeddings import get_registry
from lancedb.index import FTS
from lancedb.pydantic import LanceModel, Vector
from lancedb.query import BooleanQuery, MatchQuery, Occur
from lancedb.rerankers import Reranker
from tests.passages import TEXTS
from tests.tiny.heads import write_cross_encoder, write_stanford

from millpond import Engine
from millpond.errors import InvalidRequestError
from millpond_lancedb import MillpondReranker

pytestmark = pytest.mark.contract

QUESTION = "How does a search over a network of strings work?"


@pytest.fixture(scope="module")
def table(minilm: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    function: Any = get_registry().get("millpond").create(name=minilm, dtype="float32")

    class Passage(LanceModel):
        text: str = function.SourceField()
        vector: Vector(384) = function.VectorField()  # type: ignore[valid-type]

    table = lancedb.connect(tmp_path_factory.mktemp("lancedb")).create_table("docs", schema=Passage)
    table.add([{"text": text} for text in TEXTS])
    table.create_index("text", config=FTS())
    return table


@pytest.fixture(scope="module", params=["cross-encoder", "colbert", "embedder"])
def scorer(request: pytest.FixtureRequest, checkpoint_of: Callable[..., Path], minilm: str) -> str:
    writers: dict[str, Any] = {"cross-encoder": write_cross_encoder, "colbert": write_stanford}
    return minilm if request.param == "embedder" else str(checkpoint_of(writers[request.param]))


def search(table: Any, kind: str) -> Any:
    return table.search(QUESTION, query_type=kind).limit(6)


@pytest.mark.parametrize("kind", ["vector", "fts", "hybrid"])
@pytest.mark.parametrize("return_score", ["relevance", "all"])
def test_a_search_is_ranked_as_the_engine_ranks_it(
    table: Any, scorer: str, kind: str, return_score: str, engine_of: Callable[..., Engine]
) -> None:
    reranker = MillpondReranker(scorer, return_score=return_score, dtype="float32", device="cpu")
    assert isinstance(reranker, Reranker)
    query = search(table, kind)
    hits = query.rerank(reranker).to_list()
    parts = ["vector", "fts"] if kind == "hybrid" else [kind]
    found = {part: {row["text"]: row for row in search(table, part).to_list()} for part in parts}
    texts = list(dict.fromkeys(text for rows in found.values() for text in rows))
    ranked = engine_of(Path(scorer)).rerank(QUESTION, texts)
    assert [hit["text"] for hit in hits] == [each.document for each in ranked][:6]
    assert [hit["_relevance_score"] for hit in hits] == pytest.approx(
        [each.relevance_score for each in ranked][:6], abs=1e-5
    )
    assert [hit["text"] for hit in hits] != texts[:6]  # the order of the searches
    for column, part in (("_distance", "vector"), ("_score", "fts")):
        kept = return_score == "all" and part in parts
        assert all((column in hit) is kept for hit in hits)
        if kept:
            assert [hit[column] for hit in hits] == pytest.approx(
                [found[part][hit["text"]][column] if hit["text"] in found[part] else None for hit in hits], abs=1e-6
            )


def test_what_one_search_found_alone_has_no_score_of_the_other(table: Any, minilm: str) -> None:
    """As LanceDB hands the rows over, without its own repair of the columns afterwards."""
    reranker = MillpondReranker(minilm, return_score="all", dtype="float32")
    vector = table.search("the moon", query_type="vector").with_row_id(True).limit(2).to_arrow()
    words = table.search("binary search tides", query_type="fts").with_row_id(True).limit(5).to_arrow()
    ranked = reranker.rerank_hybrid("binary search tides", vector, words)
    assert ranked.schema.field("vector").type == vector.schema.field("vector").type
    for column, found in (("_distance", vector), ("_score", words)):
        known = dict(zip(found["_rowid"].to_pylist(), found[column].to_pylist(), strict=True))
        assert ranked[column].to_pylist() == [known.get(row) for row in ranked["_rowid"].to_pylist()]
        assert set(known) < set(ranked["_rowid"].to_pylist())
    assert set(vector["_rowid"].to_pylist()) & set(words["_rowid"].to_pylist())  # one has both
    assert len(set(ranked["_rowid"].to_pylist())) == len(ranked)


@pytest.mark.parametrize("return_score", ["relevance", "all"])
def test_searches_without_results(table: Any, minilm: str, return_score: str) -> None:
    reranker = MillpondReranker(minilm, return_score=return_score, dtype="float32")
    for kind in ("vector", "fts", "hybrid"):
        assert search(table, kind).where("text = 'nothing'").rerank(reranker).to_list() == []
    words = table.search("zzzz", query_type="hybrid").limit(3).rerank(reranker).to_list()  # by vectors alone
    assert len(words) == 3 and all(hit["_relevance_score"] is not None for hit in words)


def test_rows_without_a_text_come_last(minilm: str, engine: Engine) -> None:
    rows = pa.table({"body": [TEXTS[0], None, TEXTS[5]], "_distance": pa.array([0.1, 0.2, 0.3], pa.float32())})
    reranker = MillpondReranker(minilm, column="body", dtype="float32")
    ranked = reranker.rerank_vector(QUESTION, rows)
    first = [each.document for each in engine.rerank(QUESTION, [TEXTS[0], TEXTS[5]])]
    assert ranked["body"].to_pylist() == [*first, None] and ranked["_relevance_score"].null_count == 1
    assert ranked.column_names == ["body", "_relevance_score"]
    with pytest.raises(InvalidRequestError, match=r"column='text' is not among .*\['body', '_distance'\]"):
        MillpondReranker(minilm).rerank_vector(QUESTION, rows)


def test_within_a_budget_rows_may_have_no_score(minilm: str) -> None:
    rows = pa.table({"text": TEXTS[:4], "_distance": pa.array([0.1, 0.2, 0.3, 0.4], pa.float32())})
    ranked = MillpondReranker(minilm, dtype="float32", budget_ms=1e-9).rerank_vector(QUESTION, rows)
    assert ranked["text"].to_pylist() == TEXTS[:4] and ranked["_relevance_score"].null_count == 4
    every = MillpondReranker(minilm, dtype="float32", budget_ms=3.6e6).rerank_vector(QUESTION, rows)
    assert every["_relevance_score"].null_count == 0


def test_queries_of_lancedb(table: Any, minilm: str) -> None:
    reranker = MillpondReranker(minilm, dtype="float32")
    asked = table.search(MatchQuery("binary search", "text"), query_type="fts").rerank(reranker).to_list()
    assert [hit["text"] for hit in asked] == [
        hit["text"] for hit in table.search("binary search", query_type="fts").rerank(reranker).to_list()
    ]
    both = BooleanQuery([(Occur.SHOULD, MatchQuery("binary", "text")), (Occur.SHOULD, MatchQuery("moon", "text"))])
    with pytest.raises(InvalidRequestError, match="has no text to compare rows with"):
        table.search(both, query_type="fts").rerank(reranker).to_list()


def test_several_searches(table: Any, minilm: str, engine: Engine) -> None:
    reranker = MillpondReranker(minilm, dtype="float32")
    parts = [
        table.search(text, query_type="vector").with_row_id(True).limit(4).to_arrow() for text in (QUESTION, "The moon")
    ]
    ranked = reranker.rerank_multivector(parts, QUESTION, deduplicate=True)
    texts = list(dict.fromkeys(text for part in parts for text in part["text"].to_pylist()))
    scores = {each.document: each.relevance_score for each in engine.rerank(QUESTION, texts)}
    assert sorted(ranked["text"].to_pylist()) == sorted(texts)
    assert ranked["_relevance_score"].to_pylist() == pytest.approx(
        [scores[text] for text in ranked["text"].to_pylist()], abs=1e-5
    )
    assert np.all(np.diff(ranked["_relevance_score"].to_numpy()) <= 0)


def test_options_and_names(minilm: str, engine: Engine) -> None:
    assert str(MillpondReranker(model_name=minilm)) == f"MillpondReranker({minilm})"
    assert str(MillpondReranker(engine=engine, method="cosine")) == f"MillpondReranker({engine.spec.name})"
    for options in ({"return_score": "some"}, {"whatever": 1}, {"method": "bm25"}):
        with pytest.raises(ValueError, match=r"score must be|whatever|method"):
            MillpondReranker(minilm, **options)
    with pytest.raises(ValueError, match="pass either model="):
        MillpondReranker()


async def test_the_asynchronous_connection(table: Any, minilm: str, engine: Engine) -> None:
    connection = await lancedb.connect_async(Path(table._conn.uri))
    opened = await connection.open_table("docs")
    reranker = MillpondReranker(minilm, dtype="float32")
    hits = await (await opened.search(QUESTION, query_type="hybrid")).limit(6).rerank(reranker).to_list()
    ranked = engine.rerank(QUESTION, [hit["text"] for hit in hits])
    assert [hit["text"] for hit in hits] == [each.document for each in ranked]
