"""Points that lack some of the collection's vectors, as a framework writes them: found, in order, by the one request.

The reference is numpy; Qdrant's real engine answers the same requests, since local mode is a re-implementation.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from qdrant_client import QdrantClient, models

from millpond import Engine
from millpond.ingest import Record, ingest, point_id
from millpond_qdrant import QdrantSink

pytestmark = pytest.mark.contract

QUESTION = "what moves blood around the body?"
WIDTHS = (16, 64, 384)
SUBSETS = [(16, 64, 384), (384,), (16,), (64,), (16, 384), (64, 384), (16, 64)]
Vector = npt.NDArray[np.float32]
Point = tuple[str, dict[int, Vector], dict[str, Any]]  # text, vectors by width, metadata


@pytest.fixture(scope="module")
def points(engine: Engine) -> list[Point]:
    """72 texts, each with another subset of the vectors than its neighbours."""
    nouns = ["a river", "a zip file", "bread", "sockets", "arteries", "a search", "glaciers", "violins", "the heart"]
    texts = [f"{verb} {noun}" for verb in ("mending", "measuring", "the price of", "painting") for noun in nouns]
    texts += [f"{text}, again" for text in texts]
    rows = engine.embed(texts, role="document").embeddings
    cut = [{width: row[:width] / np.linalg.norm(row[:width]) for width in WIDTHS} for row in rows]
    return [
        (text, {width: vectors[width] for width in SUBSETS[n % len(SUBSETS)]}, {"n": n % 3})
        for n, (text, vectors) in enumerate(zip(texts, cut, strict=True))
    ]


@pytest.fixture(scope="module")
def sink(engine: Engine, points: list[Point]) -> Iterator[QdrantSink]:
    with QdrantSink(":memory:", "docs", dimensions=WIDTHS, fields="langchain") as sink:
        sink.prepare(engine.spec)
        put(sink.client, points)
        yield sink


def put(client: QdrantClient, points: Sequence[Point]) -> None:
    rows = [
        models.PointStruct(
            id=str(uuid.uuid5(uuid.NAMESPACE_URL, text)),
            vector={f"d{width}": vector.tolist() for width, vector in vectors.items()},
            payload={"page_content": text, "metadata": metadata},
        )
        for text, vectors, metadata in points
    ]
    client.upsert("docs", points=rows)


def expected(
    points: list[Point], query: Vector, *, k: int, candidates: int, coarse_to_fine: bool
) -> list[tuple[str, float]]:
    """Text and cosine of the hits: the funnel over the points that have the largest width, the others as they are."""

    def cosine(vectors: dict[int, Vector], width: int) -> float:
        return float(vectors[width] @ (query[:width] / np.linalg.norm(query[:width])))

    full, coarse = max(WIDTHS), min(WIDTHS)
    whole = [(text, vectors) for text, vectors, _ in points if full in vectors]
    if coarse_to_fine:
        both = sorted((p for p in whole if coarse in p[1]), key=lambda p: cosine(p[1], coarse), reverse=True)
        whole = both[:candidates] + [p for p in whole if coarse not in p[1]]
    scores = [(text, cosine(vectors, full)) for text, vectors in whole]
    scores += [(text, cosine(vectors, max(vectors))) for text, vectors, _ in points if full not in vectors]
    return sorted(scores, key=lambda pair: pair[1], reverse=True)[:k]


@pytest.mark.parametrize("coarse_to_fine", [True, False])
@pytest.mark.parametrize(("k", "candidates", "n"), [(1, 1, None), (10, 10, 0), (10, 30, [1, 2]), (200, 500, None)])
def test_a_search_finds_them_in_the_order_of_their_cosines(
    engine: Engine, sink: QdrantSink, points: list[Point], n: Any, k: int, candidates: int, coarse_to_fine: bool
) -> None:
    accepted = [0, 1, 2] if n is None else [n] if isinstance(n, int) else n
    for question in (QUESTION, "ice", "music for strings"):
        query = engine.embed([question], role="query").embeddings[0]
        matching = [point for point in points if point[2]["n"] in accepted]
        hits = sink.search(
            engine,
            question,
            k=k,
            candidates=candidates,
            coarse_to_fine=coarse_to_fine,
            filter=None if n is None else {"n": n},
        )
        wanted = expected(matching, query, k=k, candidates=candidates, coarse_to_fine=coarse_to_fine)
        assert [hit.text for hit in hits] == [text for text, _ in wanted]
        assert [hit.score for hit in hits] == pytest.approx([score for _, score in wanted], abs=1e-5)
        assert {type(hit.score) for hit in hits} <= {float}


def test_a_native_filter_with_alternatives_holds_for_them_too(engine: Engine, sink: QdrantSink) -> None:
    either = models.Filter(
        should=[models.FieldCondition(key="metadata.n", match=models.MatchValue(value=value)) for value in (0, 1)]
    )
    for coarse_to_fine in (True, False):
        hits = sink.search(engine, QUESTION, k=72, candidates=72, filter=either, coarse_to_fine=coarse_to_fine)
        assert len(hits) == 48 and {hit.metadata["n"] for hit in hits} == {0, 1}


def test_the_candidates_that_lack_the_largest_width_take_nobodys_place(engine: Engine, records: list[Record]) -> None:
    client = QdrantClient(":memory:")
    sink = QdrantSink(client, "docs", dimensions=[16, 384], fields="langchain")
    ingest(records, engine=engine, sink=sink, show_progress=False)
    short = engine.embed([QUESTION], role="query", dimensions=16, normalize=True).embeddings[0]
    put(client, [(f"short {n}", {16: short}, {}) for n in range(20)])  # all nearer than any record
    hits = sink.search(engine, QUESTION, k=32, candidates=100, coarse_to_fine=True)
    assert len(hits) == 32 and next(hit.id for hit in hits if not hit.text.startswith("short")) == "doc-4"
    hits = sink.search(engine, QUESTION, k=12, candidates=12, coarse_to_fine=True, filter={"lang": "en"})
    assert {hit.id for hit in hits} == {record.id for record in records}


def test_nothing_else_is_asked_for_where_every_point_is_whole(
    engine: Engine, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = QdrantClient(":memory:")
    sink = QdrantSink(client, "docs", dimensions=[16, 384], fields="langchain")
    ingest(records, engine=engine, sink=sink, show_progress=False)
    stages: list[int] = []
    query = client.query_points
    monkeypatch.setattr(
        client, "query_points", lambda *a, **options: stages.append(len(options["prefetch"])) or query(*a, **options)
    )
    sink.search(engine, QUESTION, coarse_to_fine=True)
    put(client, [("whole", {16: np.ones(16, np.float32), 384: np.ones(384, np.float32)}, {})])
    sink.search(engine, QUESTION, coarse_to_fine=True)
    put(client, [("stray", {384: np.ones(384, np.float32)}, {})])
    sink.delete([hit.id for hit in sink.search(engine, QUESTION, k=14, coarse_to_fine=True) if hit.text == "stray"])
    sink.search(engine, QUESTION, coarse_to_fine=True)
    assert (stages, sink.count()) == ([1, 1, 2, 1], 13)


@pytest.mark.parametrize("form", ["plain", "langchain", "llama_index"])
def test_a_point_of_either_framework_is_read_in_a_collection_of_any_form(
    engine: Engine, records: list[Record], form: str
) -> None:
    client = QdrantClient(":memory:")
    sink = QdrantSink(client, "docs", dimensions=[64, 384], fields=form)
    ingest(records[:3], engine=engine, sink=sink, show_progress=False)
    row = engine.embed([QUESTION], role="document", normalize=True).embeddings[0].tolist()
    node = '{"id_": "x", "text": "of LlamaIndex", "metadata": {"a": 1}}'
    other = '{"id_": "x", "text_resource": {"text": "of LlamaIndex, too"}, "metadata": {"a": 1}}'
    payloads = {
        7: {"page_content": "of LangChain", "metadata": {"a": 1}},
        point_id("x"): {"_node_content": node, "doc_id": "None", "a": 1},
        point_id("y"): {"_node_content": other, "a": 1},
        point_id("z"): {"text": "of nobody", "metadata": {"a": 1}},
    }
    client.upsert("docs", [models.PointStruct(id=id, vector={"d384": row}, payload=p) for id, p in payloads.items()])
    hits = {hit.id: hit for hit in sink.search(engine, QUESTION, k=4)}
    assert {key: hit.text for key, hit in hits.items()} == {
        "7": "of LangChain",
        point_id("x"): "of LlamaIndex",
        point_id("y"): "of LlamaIndex, too",
        point_id("z"): "of nobody",
    }
    assert all(hit.metadata == {"a": 1} and hit.score == pytest.approx(1, abs=1e-5) for hit in hits.values())
    sink.delete(list(hits))  # by the ids that a search shows
    assert sink.count() == 3


def test_a_records_id_that_is_a_uuid_or_a_number_deletes_the_record(engine: Engine) -> None:
    sink = QdrantSink(":memory:", "docs", dimensions=[64, 384])
    ids = [str(uuid.UUID(int=5)), "7", "18446744073709551616", "-1", "007", "{" + str(uuid.UUID(int=9)) + "}"]
    ingest([Record(id, f"text {id}") for id in [*ids, "kept"]], engine=engine, sink=sink, show_progress=False)
    sink.delete(ids)
    assert [hit.id for hit in sink.search(engine, "text")] == ["kept"]
