"""LanceDB only: columns, versions, indexes, a full disk and kill -9. The rest is in the contract tests."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from tests.ingest.batches import rows

from millpond import Engine, FingerprintMismatchError, InvalidRequestError
from millpond.errors import SinkUnavailableError
from millpond.ingest import IngestReport, Record, SinkError, content_hash, ingest, open_sink, point_id
from millpond_lancedb import LanceDBSink, sink_from_url


def fill(engine: Engine, sink: LanceDBSink, records: list[Record]) -> IngestReport:
    return ingest(records, engine=engine, sink=sink, show_progress=False)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "vectors")


@pytest.mark.parametrize(
    ("datatype", "kind", "another", "tolerance"),
    [("float32", "float", "float16", 1e-6), ("float16", "halffloat", "float32", 1e-3)],
)
def test_the_columns_have_the_datatype(
    engine: Engine, records: list[Record], uri: str, datatype: str, kind: str, another: str, tolerance: float
) -> None:
    with LanceDBSink(uri, "docs", dimensions=[64, 384], datatype=datatype) as sink:
        assert fill(engine, sink, records).written == 12
        schema = sink.client.open_table("docs").schema
        assert schema.names == ["pk", "id", "text", "content_hash", "metadata", "labels", "d64", "d384"]
        assert [str(schema.field(name).type.value_type) for name in ("d64", "d384")] == [kind, kind]
        manifest = json.loads(schema.metadata[b"millpond"])
        assert (manifest["fingerprint"], manifest["dimensions"]) == (engine.spec.fingerprint, [64, 384])
        vectors = engine.embed([record.text for record in records], role="document", normalize=True).embeddings
        (question,) = engine.embed(["what moves blood?"], role="query", normalize=True).embeddings
        expected = {record.id: float(score) for record, score in zip(records, vectors @ question, strict=True)}
        for coarse_to_fine in (True, False):
            hits = sink.search(engine, "what moves blood?", k=12, coarse_to_fine=coarse_to_fine)
            assert {hit.id: hit.score for hit in hits} == pytest.approx(expected, abs=10 * tolerance)
        row = sink.fetch([point_id("doc-4"), point_id("nobody")], widths=[64, 384])[point_id("doc-4")]
        assert (row.record_id, row.content_hash) == ("doc-4", content_hash(records[4].text))
        assert row.vectors[384] == pytest.approx(vectors[4], abs=tolerance)
        assert row.vectors[64] == pytest.approx(vectors[4][:64] / np.linalg.norm(vectors[4][:64]), abs=tolerance)
        other = LanceDBSink(sink.client, "docs", dimensions=[64, 384], datatype=another)
        with pytest.raises(InvalidRequestError, match=f"holds vectors of {datatype}.*pass datatype='{datatype}'"):
            fill(engine, other, records)


def test_a_condition_of_the_database_is_passed_on(engine: Engine, records: list[Record], uri: str) -> None:
    with LanceDBSink(uri, "docs", dimensions=[64, 384]) as sink:
        fill(engine, sink, records)
        hits = sink.search(engine, "anything", filter="json_get_int(metadata, 'n') < 3 AND id LIKE 'doc-%'")
        assert {hit.id for hit in hits} == {"doc-0", "doc-1", "doc-2"}
        with pytest.raises(SinkError, match="LanceDB at .* refused a search: "):
            sink.search(engine, "anything", filter="this is (no condition")
        sink.delete(filter="json_get_int(metadata, 'n') < 3")
        assert sink.count() == 9


def test_a_scan_reads_one_version_while_the_table_changes(
    engine: Engine, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond_lancedb.sink.LanceDBConnection.max_rows", 7)
    with LanceDBSink(uri, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        sink.write(rows(50, 32))
        seen = []
        for row_id, record_id in sink.scan():
            assert row_id == point_id(record_id)
            seen.append(record_id)
            sink.delete_rows([row_id])
        assert sorted(seen) == sorted(f"r{i}" for i in range(50)) and sink.count() == 0


def test_closing_merges_the_files_of_a_run(engine: Engine, uri: str) -> None:
    with LanceDBSink(uri, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        for n in range(20):
            sink.write(rows(5, 32, 5 * n))
        assert sink.client.open_table("docs").stats()["fragment_stats"]["num_fragments"] == 20
    with LanceDBSink(uri, "docs", dimensions=[32]) as again:
        assert again.client.open_table("docs").stats()["fragment_stats"]["num_fragments"] == 1 and again.count() == 100
        assert [each.columns for each in again.client.open_table("docs").list_indices()] == [
            ["pk"]
        ]  # so that a write reads no other id
        versions = again.client.open_table("docs").version
    assert (
        LanceDBSink(uri, "docs").client.open_table("docs").version == versions
    )  # nothing was written, so nothing is merged


@pytest.mark.contract
def test_a_long_run_merges_on_its_way_and_drops_old_versions(
    engine: Engine, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond_lancedb.sink._WRITES", 8)
    monkeypatch.setattr("millpond_lancedb.sink._KEPT", timedelta(milliseconds=1))
    with LanceDBSink(uri, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        for n in range(40):
            sink.write(rows(5, 32, 5 * n))
        assert (
            sink.client.open_table("docs").stats()["fragment_stats"]["num_fragments"] <= 2
        )  # what is indexed, and what is new
        assert sink.count() == 200
        for n in range(0, 40, 3):  # rows behind the index and before it are replaced, not doubled
            sink.write(rows(5, 32, 5 * n))
        assert sink.count() == len(dict(sink.scan())) == 200
    with LanceDBSink(uri, "docs") as again:
        assert len(again.client.open_table("docs").list_versions()) <= 3


@pytest.mark.contract
@pytest.mark.parametrize("index", ["IVF_PQ", "IVF_HNSW_SQ"])
def test_an_index_is_built_after_a_run_and_used(engine: Engine, uri: str, index: str) -> None:
    with LanceDBSink(uri, "docs", dimensions=[16, 384], index=index) as sink:
        records = [Record(f"r{n}", f"text {n}", {"odd": n % 2 == 1}) for n in range(300)]
        fill(engine, sink, records)
        exact = [hit.id for hit in sink.search(engine, "text 7", k=10, candidates=300)]
    with LanceDBSink(uri, "docs") as sink:
        kinds = {
            column: each.index_type for each in sink.client.open_table("docs").list_indices() for column in each.columns
        }
        assert kinds.keys() == {"d16", "labels", "pk"} and "LabelList" in kinds["labels"].replace("_", "")
        found = [hit.id for hit in sink.search(engine, "text 7", k=10)]
        assert len(set(found) & set(exact)) >= 8
        assert len(sink.search(engine, "text 7", k=150, filter={"odd": True})) > 100
        assert all(hit.metadata["odd"] for hit in sink.search(engine, "text 7", k=50, filter={"odd": True}))
        sink.create_index()  # once more, which changes nothing
    with LanceDBSink(uri, "docs", dimensions=[16, 384], index=index) as sink:
        fill(engine, sink, [Record("new", "a glacier", {"odd": True})])
        assert sink.search(engine, "a glacier", k=1, filter={"odd": True})[0].id == "new"


def test_an_index_that_cannot_be_built_is_said_in_the_log(
    engine: Engine, records: list[Record], uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LanceDBSink(uri, "docs", index="IVF_PQ") as sink:
        fill(engine, sink, records)
        sink.client.open_table("docs").drop_columns(["labels"])
    assert "refused an index" in caplog.text and "every row is stored" in caplog.text
    with LanceDBSink(uri, "docs") as again:
        assert again.count() == 12
        with pytest.raises(SinkError, match="refused an index"):
            again.create_index()


@pytest.mark.contract
def test_what_another_process_wrote_is_seen_at_once(engine: Engine, uri: str) -> None:
    program = (
        "import sys, lancedb\n"
        "table = lancedb.connect(sys.argv[1]).open_table('docs')\n"
        "table.delete('json_get_int(metadata, \\'n\\') < 3')\n"
    )
    with LanceDBSink(uri, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        sink.write(rows(10, 32))
        assert sink.count() == 10
        subprocess.run([sys.executable, "-c", program, uri], check=True, timeout=60)
        assert sink.count() == 7 and len(sink.search(engine, "x")) == 7
        sink.write(rows(3, 32))
        assert sink.count() == 10


def test_a_foreign_table_is_left_alone(engine: Engine, records: list[Record], uri: str) -> None:
    table = lancedb.connect(uri).create_table("docs", pa.table({"pk": ["a"], "text": ["x"]}))
    sink = LanceDBSink(uri, "docs")
    with pytest.raises(FingerprintMismatchError, match="was not made by millpond"):
        fill(engine, sink, records)
    with pytest.raises(FingerprintMismatchError, match="was not made by millpond"):
        sink.search(engine, "anything")
    assert table.count_rows() == 1


@pytest.mark.parametrize("comment", ["not json", "[]", "{}"])
def test_an_unreadable_manifest_is_an_error(engine: Engine, uri: str, comment: str) -> None:
    schema = pa.schema([("pk", pa.string())], metadata={"millpond": comment})
    lancedb.connect(uri).create_table("docs", schema=schema)
    with pytest.raises(FingerprintMismatchError, match="cannot read"):
        LanceDBSink(uri, "docs").prepare(engine.spec)


def test_a_damaged_table_is_an_error_that_names_it(engine: Engine, records: list[Record], uri: str) -> None:
    with LanceDBSink(uri, "docs") as sink:
        fill(engine, sink, records)
    for file in Path(uri).glob("docs.lance/data/*.lance"):
        file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(SinkError, match=f"LanceDB at {uri} refused a search"), LanceDBSink(uri, "docs") as sink:
        sink.search(engine, "anything")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a disk without room does: a write beyond it fails."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def test_after_a_write_that_failed_the_next_one_is_safe(engine: Engine, uri: str) -> None:
    with LanceDBSink(uri, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        sink.write(rows(100, 32))
        assert not sink.embedded
        for size in (0, 500, 5000):
            with (
                files_of_at_most(size),
                pytest.raises(SinkUnavailableError, match="refused an upsert of 400 rows: .*os error 27"),
            ):
                sink.write(rows(400, 32, 50))
            assert sink.count() == 100 and len(dict(sink.scan())) == 100
        sink.write(rows(400, 32, 50))
        sink.write(rows(10, 32, 450))
    with LanceDBSink(uri, "docs") as again:
        assert {name for _, name in again.scan()} == {f"r{i}" for i in range(460)} and again.count() == 460


def test_a_merge_that_fails_costs_no_row(engine: Engine, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    with LanceDBSink(uri, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        for n in range(3):
            sink.write(rows(400, 32, 400 * n))
        with files_of_at_most(5000):
            sink.close()
    assert "refused a merge of its files" in caplog.text and "every row is stored" in caplog.text
    with LanceDBSink(uri, "docs") as again:
        assert again.count() == 1200


WRITER = """
import sys
import numpy as np
from millpond.ingest import Record, WriteBatch, point_id
from millpond_lancedb import LanceDBSink
sink = LanceDBSink(sys.argv[1], "docs", dimensions=[32])
sink.manifest = sink.open()
for n in range(int(sys.argv[2]), 10**9, 50):
    records = [Record(f"r{i}", f"text {i}") for i in range(n, n + 50)]
    vectors = np.full((50, 32), 32**-0.5, np.float32)
    sink.write(WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors={32: vectors}))
    print(n + 50, flush=True)
"""


@pytest.mark.contract
@pytest.mark.slow
def test_a_killed_writer_loses_no_row_that_was_acknowledged(engine: Engine, uri: str) -> None:
    with LanceDBSink(uri, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
    done, random = 0, np.random.default_rng(0)
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, uri, str(done)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            done = int(writer.stdout.readline())
            time.sleep(float(random.uniform(0, 0.2)))
            writer.send_signal(signal.SIGKILL)
            for line in writer.stdout:
                done = int(line)
        with LanceDBSink(uri, "docs") as sink:
            stored = [record_id for _, record_id in sink.scan()]
            assert len(stored) == len(set(stored)) == sink.count() and len(stored) % 50 == 0
            assert set(stored) >= {f"r{i}" for i in range(done)} and len(stored) <= done + 50


@pytest.mark.parametrize("place", ["", "s3://bucket/x", "localhost:8000", "db://x", "http://host"])
def test_what_is_no_folder_is_refused(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequestError, match="the uri is no folder; write './NAME' .*lancedb.connect"):
        LanceDBSink(place, "docs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".docs", "-docs", "ä", "a/b", "../docs", "x" * 129, "a b"])
def test_names_that_are_refused(uri: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no name for LanceDB"):
        LanceDBSink(uri, name)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point is known, whether or not the package is installed."""
    point = EntryPoint("lancedb", "millpond_lancedb:sink_from_url", "millpond.sinks")
    monkeypatch.setattr("millpond.ingest.sinks.database.entry_points", lambda group: [point])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": "langchain"}, "fields='langchain': .* pass fields='plain'"),
        ({"datatype": "int8"}, "datatype='int8': .* pass datatype='float32', or one of 'float16'"),
        ({"index": "hnsw"}, "index='hnsw': .* pass index=None, or one of 'IVF_PQ', 'IVF_HNSW_SQ'"),
        ({"hybrid": True}, "this sink has no option 'hybrid'"),
    ],
)
@pytest.mark.usefixtures("registered")
def test_options_that_it_does_not_have_are_refused(uri: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        open_sink(f"lancedb+path:{uri}#docs", **options)
    assert not Path(uri).exists()


@pytest.mark.usefixtures("registered")
def test_a_url_opens_a_table(engine: Engine, records: list[Record], uri: str) -> None:
    sink = open_sink(f"lancedb+path:{uri}#docs", dimensions=[64, 384], datatype="float16")
    assert isinstance(sink, LanceDBSink)
    with sink:
        assert repr(sink) == f"LanceDBSink({uri!r}, 'docs', dimensions=(64, 384), fields=None)"
        fill(engine, sink, records)
        assert sink.search(engine, "what moves blood around the body?", k=1)[0].id == "doc-4"


@pytest.mark.parametrize(("scheme", "location"), [("path", ""), ("http", "//host"), ("memory", "")])
def test_urls_of_other_schemes_are_refused(scheme: str, location: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not name a LanceDB; write lancedb.path:DIR#docs"):
        sink_from_url(scheme, location, "docs")
