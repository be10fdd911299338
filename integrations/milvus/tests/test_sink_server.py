"""MilvusSink on a server: what it sends, and how it reads rows back, against a fake that checks the requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from integrations.milvus.tests.fake_milvus import FakeMilvus, serving
from pymilvus.grpc_gen import common_pb2, schema_pb2

from millpond import Engine, InvalidRequestError, MissingExtraError
from millpond.errors import FingerprintMismatchError
from millpond.ingest import Record, WriteBatch, content_hash, open_sink, point_id
from millpond_milvus import MilvusSink

pytestmark = pytest.mark.contract


@pytest.fixture
def fake() -> Iterator[FakeMilvus]:
    servicer = FakeMilvus()
    with serving(servicer):
        yield servicer


def unit(count: int, width: int, *, seed: int = 0) -> Any:
    rows = np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def batch(count: int, *widths: int, sparse: Any = None, metadata: Any = None) -> WriteBatch:
    records = [Record(f"r{n}", f"text {n}", {"n": n} if metadata is None else metadata) for n in range(count)]
    vectors = {width: unit(count, width) for width in widths}
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors=vectors, sparse=sparse)


def fields(fake: FakeMilvus) -> dict[str, int]:
    return {field.name: field.data_type for field in fake.schema.fields}


def index_of(fake: FakeMilvus, name: str) -> dict[str, Any]:
    params = {pair.key: pair.value for pair in fake.indexes[name].extra_params}
    return params | json.loads(params.pop("params", "{}"))


@pytest.mark.parametrize(
    ("datatype", "kind", "tolerance"),
    [
        ("float32", schema_pb2.FloatVector, 0.0),
        ("float16", schema_pb2.Float16Vector, 2**-11),
        ("bfloat16", schema_pb2.BFloat16Vector, 2**-8),
        ("int8", schema_pb2.Int8Vector, 0.01),
    ],
)
def test_vectors_are_stored_as_the_data_type_and_read_back(
    fake: FakeMilvus, engine: Engine, datatype: str, kind: int, tolerance: float
) -> None:
    if datatype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    with open_sink(f"milvus+{fake.url}#docs", dimensions=[16, 128], datatype=datatype) as sink:
        assert isinstance(sink, MilvusSink)
        sink.prepare(engine.spec)
        written = batch(20, 16, 128)
        sink.write(written)
        assert fields(fake)["d16"] == fields(fake)["d128"] == kind
        stored = sink.fetch([*written.ids, "nobody"], widths=[16, 128])
        assert list(stored) == sorted(written.ids) or set(stored) == set(written.ids)
        for n, row_id in enumerate(written.ids):
            row = stored[row_id]
            assert (row.record_id, row.content_hash) == (f"r{n}", content_hash(f"text {n}"))
            for width in (16, 128):
                vector = row.vectors[width]
                assert vector.dtype == np.float32 and vector.shape == (width,)
                assert np.abs(vector - written.vectors[width][n]).max() <= tolerance
                assert float(vector @ written.vectors[width][n]) / float(np.linalg.norm(vector)) > 1 - 1e-3
        sink.search(engine, "anything", k=3)
        for request in fake.searches:
            (holder,) = common_pb2.PlaceholderGroup.FromString(request.placeholder_group).placeholders
            assert (
                holder.type
                == {
                    "float32": common_pb2.FloatVector,
                    "float16": common_pb2.Float16Vector,
                    "bfloat16": common_pb2.BFloat16Vector,
                    "int8": common_pb2.Int8Vector,
                }[datatype]
            )
    with MilvusSink(fake.url, "docs") as reader:  # what the collection has need not be said to read it
        assert reader.fetch(written.ids[:1], widths=[16])[written.ids[0]].vectors[16].shape == (16,)


def test_bfloat16_without_its_library_is_an_error_with_the_command(
    fake: FakeMilvus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(MissingExtraError, match="pip install ml_dtypes"):
        MilvusSink(fake.url, "docs", datatype="bfloat16")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"index_type": "AUTOINDEX"}),
        ({"index_type": "HNSW"}, {"index_type": "HNSW", "M": 16}),
        ({"index_type": "IVF"}, {"index_type": "IVF_FLAT", "nlist": 1024}),
        ({"index_quantization": "scalar"}, {"index_type": "HNSW_SQ", "sq_type": "SQ8"}),
        ({"index_quantization": "scalar", "index_type": "IVF"}, {"index_type": "IVF_SQ8"}),
        ({"index_quantization": "product"}, {"index_type": "HNSW_PQ", "m": 32, "nbits": 8, "refine": True}),
        ({"index_quantization": "product", "index_type": "IVF"}, {"index_type": "IVF_PQ", "m": 32}),
        ({"index_quantization": "binary"}, {"index_type": "IVF_RABITQ", "refine": True, "refine_type": "FP16"}),
        ({"datatype": "int8", "index_type": "HNSW"}, {"index_type": "HNSW"}),
    ],
    ids=["auto", "hnsw", "ivf", "sq", "ivf-sq", "pq", "ivf-pq", "rabitq", "int8-hnsw"],
)
def test_the_index_is_the_one_of_its_options(
    fake: FakeMilvus, engine: Engine, options: dict[str, str], expected: dict[str, Any]
) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[128], **options) as sink:  # type: ignore[arg-type]
        sink.prepare(engine.spec)
        index = index_of(fake, "d128")
        assert index["metric_type"] == "COSINE"
        assert {key: index[key] for key in expected} == {
            key: index[key].__class__(value) for key, value in expected.items()
        }
        sink.write(batch(3, 128))
        sink.search(engine, "anything", k=2)
        (request,) = fake.searches
        searched = {pair.key: pair.value for pair in request.search_params}
        params = json.loads(searched["params"]) if "params" in searched else {}
        if expected["index_type"].startswith("HNSW"):
            assert params["ef"] == 128
        if expected["index_type"].startswith("IVF"):
            assert params["nprobe"] == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"datatype": "uint8"}, "datatype='uint8' is unknown; choose one of float32, float16, bfloat16, int8"),
        (
            {"index_quantization": "rotary"},
            "index_quantization='rotary' is unknown; choose one of scalar, product, binary",
        ),
        ({"index_type": "IVF_PQ"}, "index_type='IVF_PQ' is unknown; choose one of AUTOINDEX, FLAT, HNSW, IVF"),
        (
            {"index_type": "HNSW", "index_quantization": "binary"},
            "'HNSW' has no index_quantization='binary'; choose one of IVF",
        ),
        ({"datatype": "int8", "index_quantization": "scalar"}, "datatype='int8' is indexed by AUTOINDEX, FLAT or HNSW"),
        ({"partitions": 4}, "partitions=4 must be an int from 1 to 1024, beside a partition_key"),
        ({"hybrid": "splade"}, "hybrid='splade' is unknown; choose one of False, True, 'bm25'"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_asked(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        MilvusSink("http://127.0.0.1:1", "docs", **options)


@pytest.mark.parametrize(
    ("made", "opened", "message"),
    [
        ({}, {"datatype": "float16"}, "made with datatype='float32', and this sink has datatype='float16'"),
        ({"datatype": "int8"}, {}, "made with datatype='int8', .*; pass datatype='int8', or another collection"),
        (
            {"index_quantization": "scalar"},
            {"index_quantization": "product"},
            "index_quantization='scalar', .* index_quantization='product'",
        ),
        ({"partition_key": "a"}, {"partition_key": "b"}, "made with partition_key='a', .* partition_key='b'"),
        ({"hybrid": "bm25"}, {}, "made with hybrid='bm25', and this sink has hybrid=False"),
    ],
)
def test_a_collection_made_with_other_options_is_refused_with_both(
    fake: FakeMilvus, engine: Engine, made: dict[str, Any], opened: dict[str, Any], message: str
) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16], **made) as sink:
        sink.prepare(engine.spec)
    with (
        MilvusSink(fake.url, "docs", dimensions=[16], **opened) as other,
        pytest.raises(InvalidRequestError, match=message),
    ):
        other.prepare(engine.spec)
    with MilvusSink(fake.url, "docs", dimensions=[16], **made) as same:
        same.prepare(engine.spec)


def test_options_of_a_later_version_are_not_guessed(fake: FakeMilvus, engine: Engine) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16], datatype="float16") as sink:
        sink.prepare(engine.spec)
    for pair in fake.created.properties:
        if pair.key == "millpond.options":
            pair.value = '{"datatype": "float4"}'
    with (
        MilvusSink(fake.url, "docs", dimensions=[16]) as other,
        pytest.raises(FingerprintMismatchError, match="options that this version of millpond cannot read"),
    ):
        other.prepare(engine.spec)


@pytest.mark.parametrize("form", ["plain", "langchain", "llama_index"])
def test_a_metadata_key_is_the_partition_key(fake: FakeMilvus, engine: Engine, form: str) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16], fields=form, partition_key="tenant", partitions=64) as sink:
        sink.prepare(engine.spec)
        (key,) = [field for field in fake.schema.fields if field.is_partition_key]
        assert (key.name, key.data_type, fake.created.num_partitions) == ("partition", schema_pb2.VarChar, 64)
        sink.write(batch(2, 16, metadata={"tenant": "acme"}))
        assert {row["partition"] for row in fake.rows.values()} == {"acme"}
        with pytest.raises(InvalidRequestError, match="under the partition key 'tenant' a int; make it a str"):
            sink.check(Record("a", "text", {"tenant": 7}))
        sink.check(Record("a", "text"))  # and without one it is empty
        expression = sink._driver.condition({"tenant": ["acme", "b"]}, sink.open())
        assert expression.startswith('partition in ["acme", "b"] and ')
        assert "partition" not in sink._driver.condition({"n": 1}, sink.open())


def test_sparse_vectors_are_a_field_with_an_index_by_inner_product(fake: FakeMilvus, engine: Engine) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16], hybrid=True) as sink:
        sparse_spec = _sparse_spec(engine)
        sink.prepare(engine.spec, sparse=sparse_spec)
        assert fields(fake)["sparse"] == schema_pb2.SparseFloatVector
        assert (index_of(fake, "sparse")["index_type"], index_of(fake, "sparse")["metric_type"]) == (
            "SPARSE_INVERTED_INDEX",
            "IP",
        )
        sink.write(batch(3, 16, sparse=[{5: 0.5, 9: 1.25}, {}, {7: 0.0, 8: 2.0}]))
        stored = [row["sparse"] for row in fake.rows.values()]
        assert stored == [{5: 0.5, 9: 1.25}, {2**32 - 2: 1.0}, {8: 2.0}]  # an empty one would be refused


def _sparse_spec(engine: Engine) -> Any:
    import dataclasses

    return dataclasses.replace(engine.spec, tasks=frozenset([*engine.spec.tasks, "sparse_embed"]))


def test_bm25_is_a_function_of_milvus_over_the_text(fake: FakeMilvus, engine: Engine) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16, 128], hybrid="bm25") as sink:
        assert not sink.hybrid  # a run has no sparse vectors to make
        sink.prepare(engine.spec)
        (function,) = fake.schema.functions
        assert (function.type, list(function.input_field_names), list(function.output_field_names)) == (
            schema_pb2.BM25,
            ["text"],
            ["sparse"],
        )
        (text,) = [field for field in fake.schema.fields if field.name == "text"]
        assert {pair.key: pair.value for pair in text.type_params}["enable_analyzer"] == "true"
        assert index_of(fake, "sparse")["metric_type"] == "BM25"
        sink.write(batch(3, 16, 128))
        assert "sparse" not in next(iter(fake.rows.values()))
        sink.search(engine, "what is text?", k=2, hybrid=True)
        coarse, fused = fake.searches
        dense, lexical = fused.requests
        assert {pair.key: pair.value for pair in dense.search_params}["anns_field"] == "d128"
        (holder,) = common_pb2.PlaceholderGroup.FromString(lexical.placeholder_group).placeholders
        assert list(holder.values) == [b"what is text?"]
        assert all(point_id(f"r{n}") in dense.dsl for n in range(3)) and lexical.dsl == ""
        ranking = {pair.key: pair.value for pair in fused.rank_params}
        assert ranking["strategy"] == "rrf" and json.loads(ranking["params"]) == {"k": 60}
        assert ranking["limit"] == "2" and coarse.nq == 1


@pytest.mark.parametrize("form", ["plain", "langchain", "llama_index"])
def test_a_scan_has_every_row_and_no_text(fake: FakeMilvus, engine: Engine, form: str) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16], fields=form) as sink:
        sink.prepare(engine.spec)
        many = [Record(f"r{n}", "x" * 100, {"n": n}) for n in range(2000)]
        rows = WriteBatch(records=many, ids=[point_id(record.id) for record in many], vectors={16: unit(len(many), 16)})
        sink.write(rows)
        sink.write(WriteBatch(records=many[:1], ids=[point_id("long", 2)], vectors={16: unit(1, 16)}))
        fake.queries.clear()
        assert dict(sink.scan()) == {point_id(f"r{n}"): f"r{n}" for n in range(2000)} | {
            point_id("long", 2): "r0" if form != "llama_index" else point_id("long", 2)
        }
        asked = {name for request in fake.queries for name in request.output_fields}
        assert asked and not asked & {"text", "metadata", "$meta", "_node_content", "d16"}


def test_rows_are_fetched_in_requests_that_a_server_takes(
    fake: FakeMilvus, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16, 384]) as sink:
        sink.prepare(engine.spec)
        written = batch(900, 16, 384)
        sink.write(written)
        fake.queries.clear()
        monkeypatch.setattr(sink._connection, "max_bytes", 400 * 384 * 4)
        rows = sink.fetch(written.ids, widths=[16, 384])
        assert len(rows) == 900 and len(fake.queries) == 3
        assert np.array_equal(rows[written.ids[899]].vectors[384], written.vectors[384][899])
        assert sink.fetch([]) == {} and sink.fetch(["nobody"]) == {}
        assert sink.fetch(written.ids[:1])[written.ids[0]].vectors == {}


def test_only_upserts_are_sent_and_in_bounded_requests(fake: FakeMilvus, engine: Engine) -> None:
    with MilvusSink(fake.url, "docs", dimensions=[16]) as sink:
        sink.prepare(engine.spec)
        sink.write(batch(2100, 16))
        assert [request.num_rows for request in fake.upserts] == [1000, 1000, 100]
        sink.write(batch(10, 16))
        assert sink.count() == 2100 and fake.calls.count("Insert") == 0
        sink.delete(["r1", "nobody"])
        sink.delete_rows([point_id("r2")])
        assert sink.count() == 2098
