"""The requests of sinks and indexes, at a server that answers out of local mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from integrations.qdrant.tests.fake_qdrant import FakeQdrant
from qdrant_client import models

from millpond import Engine
from millpond.ingest import Record, RetryPolicy, SinkError, WriteBatch, ingest, point_id
from millpond.testing.matrices import matrices, names, ragged
from millpond_qdrant import QdrantIndex, QdrantSink

pytestmark = pytest.mark.contract


def test_requests_are_bounded_by_rows(engine: Engine, server: FakeQdrant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDRANT_API_KEY", "hunter2")
    with pytest.warns(UserWarning, match="insecure connection"):  # qdrant-client's own: a key over plain http
        sink = QdrantSink(server.url, "docs", dimensions=[64, 384])
    many = [Record(f"r{i}", f"text {i}") for i in range(600)]
    assert ingest(many, engine=engine, sink=sink, show_progress=False).written == 600
    sink.close()
    upserts = server.bodies("PUT", "/points")
    rows = [len(body["batch"]["ids"]) for body in upserts]
    assert sum(rows) == 600 and max(rows) == 256
    assert {path for method, path, *_ in server.requests if "points" in path and method == "PUT"} == {
        "/points?wait=true"
    }
    assert server.keys == {"hunter2"}
    first = upserts[0]["batch"]
    assert sorted(first["vectors"]) == ["d384", "d64"] and len(first["vectors"]["d64"][0]) == 64


def test_a_request_is_bounded_by_bytes_too(engine: Engine, server: FakeQdrant) -> None:
    records = [Record(f"r{i}", "x" * (3 << 20)) for i in range(12)]
    vectors = {width: np.eye(12, width, dtype=np.float32) for width in (64, 384)}
    with QdrantSink(server.url, "docs", dimensions=[64, 384]) as sink:
        sink.prepare(engine.spec)
        sink.write(WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors=vectors))
    sizes = [size for method, path, _, size in server.requests if (method, path) == ("PUT", "/points?wait=true")]
    assert len(sizes) == 3 and max(sizes) < 17 << 20


def test_a_run_waits_for_a_busy_server_and_splits_what_is_too_large(
    engine: Engine, server: FakeQdrant, records: list[Record]
) -> None:
    busy = iter([(503, {}, "starting"), (429, {"Retry-After": "0"}, "slow down"), (413, {}, "too large")])
    server.fault = lambda: next(busy, None)
    with QdrantSink(server.url, "docs", dimensions=[64, 384]) as sink:
        policy = RetryPolicy(first_wait=0.01)
        report = ingest(records, engine=engine, sink=sink, show_progress=False, retry=policy)
    assert (report.written, report.failed) == (12, 0)
    assert [len(body["batch"]["ids"]) for body in server.bodies("PUT", "/points")] == [12, 12, 12, 6, 6]


@pytest.mark.parametrize("condition", [None, {"lang": "en"}])
def test_a_search_is_one_request_and_finds_what_lacks_a_vector(
    engine: Engine, server: FakeQdrant, records: list[Record], condition: dict[str, str] | None
) -> None:
    local = QdrantSink(server.points, "docs", dimensions=[64, 384])
    ingest(records, engine=engine, sink=local, show_progress=False)
    stray = [
        models.PointStruct(
            id=width,
            vector={f"d{width}": engine.embed(["tides"], dimensions=width, normalize=True).embeddings[0].tolist()},
            payload={"text": f"tides {width}", "metadata": {"lang": "en"}},
        )
        for width in (64, 384)
    ]
    server.points.upsert("docs", stray)
    with QdrantSink(server.url, "docs") as sink:
        for coarse_to_fine in (True, False):
            server.requests.clear()
            hits = sink.search(engine, "tides", k=5, coarse_to_fine=coarse_to_fine, filter=condition)
            assert hits == local.search(engine, "tides", k=5, coarse_to_fine=coarse_to_fine, filter=condition)
            assert {hit.text for hit in hits[:2]} == {"tides 64", "tides 384"}
            assert [path for _, path, *_ in server.requests if "query" in path] == ["/points/query/batch"]
    with QdrantSink(server.url, "docs", dimensions=[384]) as sink:
        server.requests.clear()
        assert sink.search(engine, "tides", k=1)[0].text == "tides 384"
        assert [path for _, path, *_ in server.requests if "query" in path] == ["/points/query"]


def shape(requests: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Of the requests of one search: probes, searches, and stages before the first search."""
    searches = [request for request in requests if "query" in request]
    return len(requests) - len(searches), len(searches), len(searches[0].get("prefetch", []))


ASKED = (2, 2, 2)  # of a collection of two widths: asked, and all is looked for


def add_point(engine: Engine, server: FakeQdrant, id: int, width: int, lang: str = "en") -> None:
    """Add a point as a framework does, with one vector."""
    vector = engine.embed(["tides"], dimensions=width, normalize=True).embeddings[0].tolist()
    payload = {"text": f"tides {width}", "metadata": {"lang": lang}}
    with server.lock:
        server.points.upsert("docs", [models.PointStruct(id=id, vector={f"d{width}": vector}, payload=payload)])


def test_a_search_that_fails_has_asked_nothing(engine: Engine, server: FakeQdrant, records: list[Record]) -> None:
    """A search that was answered says for a while which vectors no point lacks; one that failed does not."""
    ingest(records, engine=engine, sink=QdrantSink(server.points, "docs", dimensions=[64, 384]), show_progress=False)

    def fail() -> None:
        raise ConnectionAbortedError

    server.before_search, server.handle_error = fail, lambda *of: None  # type: ignore[method-assign]
    with QdrantSink(server.url, "docs") as sink:
        with pytest.raises(SinkError, match="did not answer a search"):
            sink.search(engine, "tides")
        server.before_search = lambda: None
        add_point(engine, server, 1, 384)
        assert sink.search(engine, "tides")[0].text == "tides 384"
    assert [shape(body["searches"]) for body in server.bodies("POST", "/points/query/batch")] == [ASKED, ASKED]


def test_an_index_lives_on_a_server(server: FakeQdrant) -> None:
    values = matrices(12, tokens=[n % 5 for n in range(12)])
    with QdrantIndex(server.url, "docs", None) as index:
        report = index.add_embeddings(names(12), ragged(values), metadata=[{"n": n % 2} for n in range(12)])
        assert (report.added, len(index), index.stats().tokens) == (12, 12, 21)
        local = QdrantIndex(server.points, "docs", None)
        queries = ragged(matrices(2, seed=1))
        for options in ({}, {"exact": True}, {"filter": {"n": 1}}, {"ids": names(4)}, {"candidates": 3, "k": 2}):
            assert index.search_embeddings(queries, **options) == local.search_embeddings(queries, **options)
        assert "doc-3" in index and "doc-12" not in index and index.ids() == names(12) and index.check() == []
        assert index.delete(["doc-3", "doc-99"]) == 1 and index.delete(filter={"n": 1}) == 5
    with QdrantIndex(server.url, "docs", None) as index:
        assert index.ids() == names(12)[::2]


def test_the_collection_that_is_created(server: FakeQdrant) -> None:
    QdrantIndex(server.url, "docs", None).add_embeddings(["a"], ragged(matrices(1)))
    (created,) = server.bodies("PUT", "")
    assert created["vectors"] == {
        "tokens": {
            "size": 32,
            "distance": "Dot",
            "hnsw_config": {"m": 0},
            "on_disk": True,
            "datatype": "float16",
            "multivector_config": {"comparator": "max_sim"},
        },
        "muvera": {
            "size": 2560,
            "distance": "Dot",
            "quantization_config": {"scalar": {"type": "int8", "always_ram": True}},
            "on_disk": True,
            "datatype": "float16",
        },
    }
    assert created["metadata"]["millpond"]["kind"] == "late_interaction" and created["on_disk_payload"] is True
    (payload_index,) = server.bodies("PUT", "/index")
    assert payload_index == {"field_name": "tokens", "field_schema": {"type": "integer", "lookup": True, "range": True}}


def test_filters_and_ids_hold_in_both_stages(server: FakeQdrant) -> None:
    index = QdrantIndex(server.url, "docs", None)
    values = matrices(6)
    index.add_embeddings(names(6), ragged(values))
    index.search_embeddings(ragged(values[:1]), k=2, candidates=3, filter={"n": 1}, ids=names(4))
    index.search_embeddings(ragged(values[:1]), k=2, candidates=3)
    index.search_embeddings(ragged(values[:1]), k=2, filter={"n": 1})
    index.search_embeddings(ragged(values[:1]), k=2, exact=True)
    both, alone, default, exact = (
        request for body in server.bodies("POST", "/points/query/batch") for request in body["searches"]
    )
    assert both["filter"] == both["prefetch"]["filter"]
    among, filter = both["filter"]["must"]
    assert among == {"has_id": [point_id(id) for id in names(4)]}
    assert filter["must"][0]["should"][0]["key"] == "metadata.n"
    assert (both["prefetch"]["using"], both["prefetch"]["limit"], both["using"]) == ("muvera", 3, "tokens")
    assert len(both["query"]["nearest"]) == 6 and len(both["prefetch"]["query"]) == 2560
    assert "filter" not in alone and "filter" not in alone["prefetch"] and alone["limit"] == 3
    assert default["prefetch"]["limit"] == 1000
    assert "prefetch" not in exact
