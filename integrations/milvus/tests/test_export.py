"""Parquet files for Milvus's bulk import, read back with pyarrow. That a server imports them is not tested here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpond import Engine, FingerprintMismatchError, InvalidRequestError, MissingExtraError
from millpond.errors import SinkError
from millpond.ingest import Record, WriteBatch, open_sink, point_id
from millpond_milvus import ParquetExport

pytestmark = pytest.mark.contract

MERGED = 64  # files that are put together


def unit(count: int, width: int, *, seed: int = 0) -> Any:
    rows = np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def batch(first: int, count: int, *widths: int, seed: int = 0, text: str = "text", sparse: Any = None) -> WriteBatch:
    records = [Record(f"r{n}", f"{text} {n} ä", {"n": n, "lang": "en"}) for n in range(first, first + count)]
    vectors = {width: unit(count, width, seed=seed) for width in widths}
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors=vectors, sparse=sparse)


@pytest.fixture(scope="module")
def parquet() -> Any:
    for name in ("minio", "azure.storage.blob", "ml_dtypes", "pyarrow"):
        pytest.importorskip(name, reason="pip install 'pymilvus[bulk-writer]'")
    return pytest.importorskip("pyarrow.parquet")


def table_of(sink: ParquetExport, parquet: Any) -> dict[str, dict[str, Any]]:
    rows = [row for path in sink.files for row in parquet.read_table(path).to_pylist()]
    primary = "id" if "pk" not in rows[0] else "pk"
    found = {row[primary]: row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize(
    ("datatype", "column", "size"),
    [
        ("float32", "list<item: float>", 1),
        ("float16", "list<item: uint8>", 2),
        ("bfloat16", "list<item: uint8>", 2),
        ("int8", "list<item: int8>", 1),
    ],
)
def test_the_files_hold_the_vectors(
    parquet: Any, engine: Engine, tmp_path: Path, datatype: str, column: str, size: int
) -> None:
    with ParquetExport(tmp_path, "docs", dimensions=[16, 128], datatype=datatype) as sink:
        sink.prepare(engine.spec)
        written = batch(0, 300, 16, 128)
        sink.write(written)
        assert sink.count() == 300
    (path,) = sink.files
    schema = parquet.read_schema(path)
    assert [str(schema.field(f"d{width}").type).replace("element", "item") for width in (16, 128)] == [column] * 2
    rows = table_of(sink, parquet)
    assert parquet.read_metadata(path).num_rows == len(rows) == 300
    options = sink._layout.options
    for n, row_id in enumerate(written.ids):
        row = rows[row_id]
        assert (row["id"], row["text"]) == (f"r{n}", f"text {n} ä")
        assert json.loads(row["metadata"]) == {"n": n, "lang": "en"}
        for width in (16, 128):
            stored = row[f"d{width}"]
            assert len(stored) == width * size
            value = bytes(stored) if size == 2 else stored
            if size == 2:
                assert value == options.encode(written.vectors[width][n : n + 1])[0].tobytes()
            tolerance = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.02}[datatype]
            assert np.abs(options.decode(value) - written.vectors[width][n]).max() <= tolerance


@pytest.mark.parametrize("form", ["plain", "langchain", "llama_index"])
def test_the_files_hold_every_form_with_sparse_vectors_and_partitions(
    parquet: Any, engine: Engine, tmp_path: Path, form: str
) -> None:
    import dataclasses

    sparse_spec = dataclasses.replace(engine.spec, tasks=frozenset([*engine.spec.tasks, "sparse_embed"]))
    with ParquetExport(tmp_path, "docs", dimensions=[16], fields=form, hybrid=True, partition_key="lang") as sink:
        sink.prepare(engine.spec, sparse=sparse_spec)
        sink.write(batch(0, 2, 16, sparse=[{3: 0.5}, {}]))
    rows = list(table_of(sink, parquet).values())
    assert [json.loads(row["sparse"]) for row in rows] == [{"3": 0.5}, {str(2**32 - 2): 1.0}]
    assert {row["partition"] for row in rows} == {"en"}
    if form != "plain":
        dynamic = json.loads(rows[0]["$meta"])
        assert dynamic["n"] == 0 and len(dynamic["content_hash"]) == 64
    with ParquetExport(tmp_path / "bm25", "docs", dimensions=[16], hybrid="bm25") as sink:
        sink.prepare(engine.spec)
        sink.write(batch(0, 2, 16))
    assert "sparse" not in next(iter(table_of(sink, parquet).values()))  # Milvus makes it at the import


def test_a_run_is_resumed_and_of_equal_ids_the_last_row_stays(parquet: Any, engine: Engine, tmp_path: Path) -> None:
    sink = ParquetExport(tmp_path, "docs", dimensions=[16])
    sink.prepare(engine.spec)
    for n in range(3):
        sink.write(batch(n * 10, 10, 16))
    # The process dies here: a file that no manifest lists, and a folder half written.
    (tmp_path / "docs" / "part-000003.parquet").write_bytes(b"half")
    (tmp_path / "docs" / ".writing-x").mkdir()
    with open_sink(f"milvus+parquet:{tmp_path}#docs", dimensions=[16]) as again:
        assert isinstance(again, ParquetExport)
        again.prepare(engine.spec)
        assert again.count() == 30
        again.write(batch(25, 10, 16, text="newer", seed=1))
        again.write(batch(29, 1, 16, text="newest", seed=2))
    rows = table_of(again, parquet)
    assert len(rows) == 35 == again.count()
    texts = {row["id"]: row["text"] for row in rows.values()}
    assert [texts[f"r{n}"].split()[0] for n in (0, 24, 25, 28, 29, 34)] == [
        *("text", "text", "newer", "newer", "newest", "newer")
    ]
    assert np.array_equal(rows[point_id("r25")]["d16"], unit(10, 16, seed=1)[0])
    manifest = json.loads((tmp_path / "docs" / "manifest.json").read_text())
    assert manifest["rows"] == 35 and [part["file"] for part in manifest["parts"]] == [p.name for p in again.files]
    assert manifest["millpond"]["fingerprint"] == engine.spec.fingerprint


def test_small_files_are_put_together_and_rows_of_large_ones_replaced(
    parquet: Any, engine: Engine, tmp_path: Path
) -> None:
    with ParquetExport(tmp_path, "docs", dimensions=[4]) as sink:
        sink.prepare(engine.spec)
        for n in range(MERGED + 3):
            sink.write(batch(n, 2, 4, seed=n))  # each row but the ends twice
        assert len(sink.files) == 4
        assert all(path.exists() for path in sink.files)
    assert len(sink.files) == 2
    assert len(table_of(sink, parquet)) == MERGED + 4
    assert sorted(path.name for path in (tmp_path / "docs").glob("*.parquet")) == sorted(p.name for p in sink.files)
    with ParquetExport(tmp_path, "docs", dimensions=[4]) as sink:
        sink.prepare(engine.spec)
        sink.write(batch(0, 3, 4, seed=999, text="newer"))
    rows = table_of(sink, parquet)
    assert len(rows) == MERGED + 4
    assert [rows[point_id(f"r{n}")]["text"].split()[0] for n in range(4)] == ["newer"] * 3 + ["text"]


def test_a_folder_of_something_else_is_refused(parquet: Any, engine: Engine, tmp_path: Path) -> None:
    with ParquetExport(tmp_path, "docs", dimensions=[16]) as sink:
        sink.prepare(engine.spec)
        sink.write(batch(0, 2, 16))
    with (
        ParquetExport(tmp_path, "docs", dimensions=[32]) as other,
        pytest.raises(InvalidRequestError, match=r"holds the widths \[16\], and this sink writes \[32\]"),
    ):
        other.prepare(engine.spec)
    with (
        ParquetExport(tmp_path, "docs", dimensions=[16], datatype="float16") as other,
        pytest.raises(InvalidRequestError, match="made with datatype='float32'"),
    ):
        other.prepare(engine.spec)
    (file,) = sink.files
    file.unlink()
    with ParquetExport(tmp_path, "docs", dimensions=[16]) as other:
        with pytest.raises(SinkError, match="lists 'part-000000.parquet', which is not there"):
            other.prepare(engine.spec)
        (tmp_path / "docs" / "manifest.json").write_text("[]")
        with pytest.raises(FingerprintMismatchError, match="is no manifest that this version of millpond can read"):
            other.prepare(engine.spec)


def test_a_file_that_cannot_be_written_is_an_error_and_costs_no_other(
    parquet: Any, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    with ParquetExport(tmp_path, "docs", dimensions=[384]) as sink:
        sink.prepare(engine.spec)
        with pytest.raises(InvalidRequestError, match="not prepared"):
            ParquetExport(tmp_path, "docs").write(batch(0, 2, 384))
        sink.write(batch(0, 2, 384))
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        try:
            with pytest.raises(SinkError, match="writing 200 rows in .*docs' failed: .*File too large"):
                sink.write(batch(2, 200, 384))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert sink.count() == 2
        sink.write(batch(2, 200, 384))
    assert len(table_of(sink, parquet)) == 202
    assert not [path for path in (tmp_path / "docs").iterdir() if path.name.startswith(".")]
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with (
        pytest.raises(SinkError, match="No space left on device .* MiB are free"),
        ParquetExport(tmp_path / "full", "docs", dimensions=[384]) as full,
    ):
        full.prepare(engine.spec)


def test_without_the_bulk_writers_packages_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pymilvus.bulk_writer", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pymilvus\[bulk-writer\]'"):
        ParquetExport(tmp_path, "docs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index_type": "HNSW"}, "index_type='HNSW': Parquet files hold rows and no index"),
        ({"index_quantization": "scalar"}, "index_quantization='scalar': Parquet files hold rows"),
        ({"datatype": "bit"}, "datatype='bit' is unknown"),
        ({"hybrid": "splade"}, "hybrid='splade' is unknown"),
    ],
)
def test_options_that_files_do_not_have_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        open_sink(f"milvus+parquet:{tmp_path}#docs", **options)
