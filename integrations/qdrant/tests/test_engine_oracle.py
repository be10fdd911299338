"""The coarse-to-fine request, answered by Qdrant's real engine, since local mode is a re-implementation in Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from millpond import Engine
from millpond.ingest import Record, WriteBatch, ingest, point_id
from millpond_qdrant import QdrantSink
from millpond_qdrant.filters import to_filter

pytestmark = pytest.mark.contract


def test_the_real_engine_answers_the_coarse_to_fine_search_with_the_same_hits(engine: Engine, tmp_path: Path) -> None:
    edge = pytest.importorskip("qdrant_edge")
    words = ["river", "zip", "bread", "socket", "heart", "search", "glacier", "violin", "memory", "tide"]
    records = [Record(f"{one} {two}", f"{one} {two}") for one in words for two in words]
    sink = QdrantSink(":memory:", "docs", dimensions=[16, 384])
    sent: list[WriteBatch] = []
    send = sink.write

    def write(batch: WriteBatch) -> None:
        sent.append(batch)
        send(batch)

    sink.write = write  # type: ignore[method-assign]
    ingest(records, engine=engine, sink=sink, show_progress=False)

    vectors = {f"d{width}": edge.EdgeVectorParams(size=width, distance=edge.Distance.Cosine) for width in (16, 384)}
    (tmp_path / "shard").mkdir()
    shard = edge.EdgeShard.create(str(tmp_path / "shard"), edge.EdgeConfig(vectors=vectors))
    points = [
        edge.Point(
            id=point, vector={f"d{width}": rows[i].tolist() for width, rows in batch.vectors.items()}, payload={}
        )
        for batch in sent
        for i, point in enumerate(batch.ids)
    ]
    shard.update(edge.UpdateOperation.upsert_points(points))
    names = {point_id(record.id): record.id for record in records}
    differing = 0
    for question in ("boats", "an orchestra", "where do files go?"):
        query = engine.embed([question], role="query").embeddings
        coarse = query[0, :16] / np.linalg.norm(query[0, :16])
        request = edge.QueryRequest(
            prefetches=[edge.Prefetch(query=edge.Query.Nearest(coarse.tolist(), using="d16"), limit=15)],
            query=edge.Query.Nearest(query[0].tolist(), using="d384"),
            limit=8,
        )
        answer = shard.query(request)
        hits = sink.search(engine, question, k=8, candidates=15)
        assert [hit.id for hit in hits] == [names[str(point.id)] for point in answer]
        assert [hit.score for hit in hits] == pytest.approx([point.score for point in answer], abs=1e-5)
        differing += [hit.id for hit in sink.search(engine, question, k=8, coarse_to_fine=False)] != [
            hit.id for hit in hits
        ]
    assert differing  # otherwise the funnel could not be told from a plain search
    shard.close()


# Not a quote or a backslash, which the sink refuses.
KEYS = [
    "",
    " ",
    "a b",
    "a.b",
    "a[0]",
    "[]",
    "1",
    "-1",
    "1.5",
    "a-b",
    "a/b",
    "*",
    "$x",
    "é",
    "漢字",
    "😀",
    "a\nb",
    "a'b",
    "id",
]


def test_the_real_engine_reads_the_path_of_every_key_as_that_key(tmp_path: Path) -> None:
    edge = pytest.importorskip("qdrant_edge")
    vectors = {"v": edge.EdgeVectorParams(size=2, distance=edge.Distance.Cosine)}
    shard = edge.EdgeShard.create(str(tmp_path), edge.EdgeConfig(vectors=vectors))
    points = [
        edge.Point(id=n, vector={"v": [1.0, 1.0]}, payload={key: "flat", "metadata": {key: "nested"}})
        for n, key in enumerate(KEYS)
    ]
    shard.update(edge.UpdateOperation.upsert_points(points))
    for form, value in (("plain", "nested"), ("langchain", "nested"), ("llama_index", "flat")):
        for n, key in enumerate(KEYS):
            native = to_filter({key: value}, form)  # type: ignore[arg-type]
            (alternatives,) = native.must  # type: ignore[union-attr, misc]
            (condition,) = alternatives.should
            filter = edge.Filter(
                must=[edge.FieldCondition(condition.key, match=edge.MatchValue(condition.match.value))]
            )
            request = edge.QueryRequest(query=edge.Query.Nearest([1.0, 1.0], using="v"), filter=filter, limit=99)
            assert [point.id for point in shard.query(request)] == [n]
    shard.close()
