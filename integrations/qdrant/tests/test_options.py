"""The options of a sink as the requests that they become, at a server that answers out of local mode."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
from integrations.qdrant.tests.fake_qdrant import FakeQdrant
from qdrant_client import QdrantClient

from millpond import Engine, InvalidRequestError
from millpond.ingest import Record, ingest, open_sink
from millpond_qdrant import QdrantSink


def fill(engine: Engine, sink: QdrantSink, records: list[Record], **options: Any) -> None:
    ingest(records, engine=engine, sink=sink, show_progress=False, **options)


def created(server: FakeQdrant) -> dict[str, Any]:
    (body,) = server.bodies("PUT", "")
    vectors: dict[str, Any] = body["vectors"]
    return vectors


def test_a_collection_is_created_as_before_unless_more_is_asked(
    engine: Engine, server: FakeQdrant, records: list[Record]
) -> None:
    with QdrantSink(server.url, "docs", dimensions=[64]) as sink:
        fill(engine, sink, records)
        assert [hit.id for hit in sink.search(engine, records[4].text, k=1)] == ["doc-4"]
    assert created(server) == {"d64": {"size": 64, "distance": "Cosine"}}
    (body,) = server.bodies("PUT", "")
    assert body.keys() == {"vectors", "metadata"}
    assert not server.bodies("PUT", "/index")
    assert all("params" not in body for body in server.bodies("POST", "/points/query"))


@pytest.mark.parametrize(
    ("quantization", "config"),
    [
        ("scalar", {"scalar": {"type": "int8", "quantile": 0.99, "always_ram": True}}),
        ("product", {"product": {"compression": "x16", "always_ram": True}}),
        ("binary", {"binary": {"always_ram": True}}),
    ],
)
def test_a_quantized_collection_and_the_two_stages_of_its_search(
    engine: Engine, server: FakeQdrant, records: list[Record], quantization: str, config: dict[str, Any]
) -> None:
    hnsw = {"m": 8, "ef_construct": 64, "ef": 200}
    with QdrantSink(
        server.url,
        "docs",
        dimensions=[64, 384],
        index_quantization=quantization,
        on_disk=True,
        hnsw=hnsw,
        datatype="float16",
    ) as sink:
        fill(engine, sink, records)
        server.requests.clear()
        sink.search(engine, "tides", k=3)
        sink.search(engine, "tides", k=3)
        sink.search(engine, "tides", k=3, coarse_to_fine=False)
    first, second, third = [
        *server.bodies("POST", "/points/query/batch"),
        *server.bodies("POST", "/points/query"),
    ]
    (coarse,) = second["prefetch"]
    assert coarse["params"] == {"hnsw_ef": 200, "quantization": {"rescore": False}}
    assert second["params"] == {"hnsw_ef": 200, "quantization": {"ignore": True}}
    over = {"scalar": 2.0, "product": 4.0, "binary": 8.0}[quantization]
    assert third["params"] == {"hnsw_ef": 200, "quantization": {"rescore": True, "oversampling": over}}
    assert len(first["searches"]) == 4  # which asks for points that lack a vector, as any first search
    with QdrantSink(server.url, "docs", rescore=False) as sink:
        sink.search(engine, "tides", k=3)
    searches = server.bodies("POST", "/points/query/batch")[-1]["searches"]
    assert searches[2]["params"] == {"quantization": {"rescore": False}}
    with QdrantSink(server.url, "docs", dimensions=[384], oversampling=3) as sink:
        sink.search(engine, "tides", k=3)
    assert server.bodies("POST", "/points/query")[-1]["params"] == {
        "quantization": {"rescore": True, "oversampling": 3.0}
    }


def test_uint8_vectors_are_integers_compared_by_euclidean_distance(
    engine: Engine, server: FakeQdrant, records: list[Record]
) -> None:
    with QdrantSink(server.url, "docs", dimensions=[64, 384], datatype="uint8") as sink:
        fill(engine, sink, records)
    assert {name: params["distance"] for name, params in created(server).items()} == {"d64": "Euclid", "d384": "Euclid"}
    (body,) = server.bodies("PUT", "/points")
    rows = np.asarray(body["batch"]["vectors"]["d384"])
    assert (rows == np.rint(rows)).all() and rows.min() >= 0 and rows.max() <= 255 and np.ptp(rows) > 100
    cosines = engine.embed([records[4].text], role="document", normalize=True).embeddings
    with QdrantSink(server.url, "docs") as sink:
        hits = sink.search(engine, "what moves blood around the body?", k=12)
        query = engine.embed(["what moves blood around the body?"], role="query", normalize=True).embeddings
        assert hits[0].id == "doc-4" and hits[0].score == pytest.approx(float((query @ cosines.T)[0, 0]), abs=6e-3)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_indexes_are_made_once_on_the_path_of_the_form(
    engine: Engine, server: FakeQdrant, records: list[Record]
) -> None:
    indexes = {"n": "integer", "a b": "keyword"}
    for _ in range(2):
        with QdrantSink(server.url, "docs", dimensions=[64], indexes=indexes) as sink:
            fill(engine, sink, records)
    assert [path for _, path, *_ in server.requests if "/index" in path] == ["/index?wait=true"] * 2
    assert server.bodies("PUT", "/index") == [
        {"field_name": "metadata.n", "field_schema": "integer"},
        {"field_name": 'metadata."a b"', "field_schema": "keyword"},
    ]
    with (
        QdrantSink(server.url, "docs", dimensions=[64], indexes={"n": "keyword"}) as sink,
        pytest.raises(InvalidRequestError, match="an index of the type 'integer' on 'metadata.n', and .* 'keyword'"),
    ):
        sink.prepare(engine.spec)


@pytest.mark.parametrize(
    ("has", "asks", "words"),
    [
        ({"datatype": "float16"}, {"datatype": "float32"}, "datatype='float16', and this sink asks .*='float32'"),
        ({}, {"datatype": "float16"}, "datatype='float32', and this sink asks for datatype='float16'; leave"),
        (
            {},
            {"index_quantization": "binary"},
            "index_quantization=None, and this sink asks for index_quantization='binary'",
        ),
        ({"index_quantization": "product"}, {"index_quantization": "scalar"}, "='product', and this sink .*='scalar'"),
    ],
    ids=["float16", "float32", "none", "product"],
)
def test_another_form_than_the_collections_is_refused(
    engine: Engine, server: FakeQdrant, records: list[Record], has: dict[str, Any], asks: dict[str, Any], words: str
) -> None:
    with QdrantSink(server.url, "docs", **has) as sink:
        fill(engine, sink, records[:3])
    with QdrantSink(server.url, "docs", **asks) as sink, pytest.raises(InvalidRequestError, match=words):
        fill(engine, sink, records)
    assert server.points.count("docs").count == 3
    for options in ({}, has, {"on_disk": True, "hnsw": {"m": 4}}):  # which the collection keeps as it is
        with QdrantSink(server.url, "docs", **options) as sink:
            fill(engine, sink, records)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"datatype": "bfloat16"}, "datatype='bfloat16' is unknown; choose one of float32, float16, uint8"),
        ({"index_quantization": "int4"}, "index_quantization='int4' is unknown; choose one of scalar, product, binary"),
        ({"datatype": "uint8", "fields": "langchain"}, "use float16, or fields='plain'"),
        ({"oversampling": 0.5}, "oversampling=0.5 must be a number from 1"),
        ({"oversampling": 2.0, "rescore": False}, "leave one of them out"),
        ({"hnsw": {"ef_search": 3}}, "it takes ints named m, ef_construct, ef"),
        ({"indexes": {"year": "int"}}, "indexes: 'year': 'int' is no index of Qdrant; choose one of keyword, integer"),
        ({"indexes": {'a"b': "keyword"}}, "indexes key 'a\"b' holds a quote"),
        ({"indexes": ["year"]}, "must be a dict of metadata keys"),
        ({"hybrid": "bm25"}, "hybrid='bm25' must be True or False for Qdrant"),
        ({"batch": 0}, "batch=0 must be an int from 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_option_that_is_not_valid_is_refused_before_anything_is_asked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(words)):
        QdrantSink(":memory:", "docs", **options)


def test_batch_bounds_the_points_of_a_request(engine: Engine, server: FakeQdrant, records: list[Record]) -> None:
    with QdrantSink(server.url, "docs", batch=5) as sink:
        fill(engine, sink, records)
    bodies = server.bodies("PUT", "/points")
    assert max(len(body["batch"]["ids"]) for body in bodies) <= 5 and server.points.count("docs").count == 12


def test_a_url_takes_the_options(server: FakeQdrant) -> None:
    options = {
        "datatype": "float16",
        "index_quantization": "scalar",
        "hybrid": True,
        "timeout": 3.5,
        "oversampling": 2.0,
    }
    sink = open_sink(f"qdrant+{server.url}#docs", dimensions=[64], **options)
    assert isinstance(sink, QdrantSink) and sink.hybrid
    sink.close()
    with pytest.raises(InvalidRequestError, match="this sink has no option 'colour'"):
        open_sink(f"qdrant+{server.url}#docs", colour="red")


def test_local_mode_says_once_what_it_ignores(
    engine: Engine, records: list[Record], caplog: pytest.LogCaptureFixture
) -> None:
    client = QdrantClient(":memory:")
    options: dict[str, Any] = {"datatype": "float16", "index_quantization": "scalar", "on_disk": True}
    sink = QdrantSink(client, "docs", dimensions=[64], indexes={"n": "integer"}, **options)
    with caplog.at_level(logging.WARNING, logger="millpond_qdrant"):
        fill(engine, sink, records[:4])
        fill(engine, sink, records)
    (message,) = [record.message for record in caplog.records if record.name.startswith("millpond_qdrant")]
    assert "datatype='float16', index_quantization='scalar', on_disk=True, indexes={'metadata.n'" in message
    assert "take effect on a server only (qdrant+http://localhost:6333#docs)" in message
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="millpond_qdrant"):
        fill(engine, QdrantSink(client, "more", dimensions=[64], datatype="float32"), records)
    assert not [record for record in caplog.records if record.name.startswith("millpond_qdrant")]
