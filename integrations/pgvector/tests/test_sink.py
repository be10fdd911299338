"""pgvector only: types, indexes, transactions, limits, and servers that break. The rest is in the contract tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg.sql import SQL
from tests.ingest.batches import rows
from tests.ingest.postgres import PostgresServer

from millpond import Engine, FingerprintMismatchError, InvalidRequestError
from millpond.errors import SinkRejectedError
from millpond.ingest import IngestReport, Record, SinkError, WriteBatch, content_hash, ingest, open_sink, point_id
from millpond_pgvector import PgVectorSink, sink_from_url

pytestmark = pytest.mark.contract


def fill(engine: Engine, sink: PgVectorSink, records: list[Record]) -> IngestReport:
    return ingest(records, engine=engine, sink=sink, show_progress=False)


def types(sink: PgVectorSink) -> dict[str, str]:
    query = (
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'docs'::regclass "
        "AND attnum > 0"
    )
    return dict(sink.client.execute(query).fetchall())


@pytest.mark.parametrize(
    ("datatype", "short", "full", "tolerance"),
    [
        ("float32", "vector(64)", "vector(384)", 1e-6),
        ("float16", "halfvec(64)", "halfvec(384)", 1e-3),
        ("bit", "bit(64)", "vector(384)", 1e-6),
    ],
)
def test_the_columns_have_the_datatype(
    engine: Engine, records: list[Record], dsn: str, datatype: str, short: str, full: str, tolerance: float
) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[64, 384], datatype=datatype) as sink:
        assert fill(engine, sink, records).written == 12
        assert types(sink) == {
            "pk": "uuid", "id": "text", "text": "text", "metadata": "jsonb", "content_hash": "text",
            "d64": short, "d384": full,
        }  # fmt: skip
        vectors = engine.embed([record.text for record in records], role="document", normalize=True).embeddings
        (question,) = engine.embed(["what moves blood?"], role="query", normalize=True).embeddings
        expected = {record.id: float(score) for record, score in zip(records, vectors @ question, strict=True)}
        for coarse_to_fine in (True, False):
            hits = sink.search(engine, "what moves blood?", k=12, coarse_to_fine=coarse_to_fine)
            assert {hit.id: hit.score for hit in hits} == pytest.approx(expected, abs=10 * tolerance)
        assert hits[0].id == "doc-4"
        row = sink.fetch([point_id("doc-4")], widths=[64, 384])[point_id("doc-4")]
        assert (row.record_id, row.content_hash) == ("doc-4", content_hash(records[4].text))
        assert row.vectors[384] == pytest.approx(vectors[4], abs=tolerance)
        if datatype == "bit":
            assert row.vectors.keys() == {384}  # signs alone are no vector
        else:
            assert row.vectors[64] == pytest.approx(vectors[4][:64] / np.linalg.norm(vectors[4][:64]), abs=tolerance)
        assert row.vectors[384].dtype == np.float32


def test_signs_alone_score_by_the_share_that_agrees(engine: Engine, records: list[Record], dsn: str) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[64, 384], datatype="bit") as sink:
        fill(engine, sink, records)
        short = PgVectorSink(sink.client, "docs", dimensions=[64])
        hits = short.search(engine, "what moves blood?", k=12)
        texts = [record.text for record in records]
        vectors = engine.embed(texts, role="document", dimensions=64).embeddings
        (question,) = engine.embed(["what moves blood?"], role="query", dimensions=64).embeddings
        agree = ((vectors > 0) == (question > 0)).mean(axis=1)  # the cosine of the signs is twice that, less 1
        expected = {record.id: 2 * float(share) - 1 for record, share in zip(records, agree, strict=True)}
        assert {hit.id: hit.score for hit in hits} == pytest.approx(expected)


def test_signs_need_a_full_width_beside_them(engine: Engine, dsn: str) -> None:
    sink = PgVectorSink(dsn, "docs", dimensions=[384], datatype="bit")
    with pytest.raises(InvalidRequestError, match="'bit' keeps the largest width .* pass two dimensions"):
        sink.prepare(engine.spec)
    assert sink.count() == 0
    sink.close()


def test_another_datatype_is_refused_before_anything_is_written(
    engine: Engine, records: list[Record], dsn: str
) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[64, 384], datatype="float16") as sink:
        fill(engine, sink, records[:3])
        with pytest.raises(InvalidRequestError, match="holds vectors of float16.*pass datatype='float16'"):
            fill(engine, PgVectorSink(sink.client, "docs", dimensions=[64, 384], datatype="float32"), records)
        fill(engine, PgVectorSink(sink.client, "docs"), records[:3])  # takes the type and the widths of the table
        assert len(PgVectorSink(sink.client, "docs").search(engine, "anything")) == 3


@pytest.mark.parametrize("width", [1, 7, 8, 9, 65])
def test_widths_that_fill_no_byte_are_packed(engine: Engine, dsn: str, width: int) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[width, 384], datatype="bit") as sink:
        sink.prepare(engine.spec)
        batch, full = rows(5, width), rows(5, 384)
        sink.write(WriteBatch(records=batch.records, ids=batch.ids, vectors={**batch.vectors, **full.vectors}))
        stored = dict(sink.client.execute(f"SELECT pk::text, d{width}::text FROM docs").fetchall())
        for point, vector in zip(batch.ids, batch.vectors[width], strict=True):
            assert stored[point] == "".join("1" if number > 0 else "0" for number in vector)


@pytest.mark.parametrize(
    "record",
    [
        Record("nul", "a\0b"),
        Record("nul", "x", {"k": ["\0"]}),
        Record("nul", "x", {"k\0": 1}),
        Record("nul", "x", {"k": "\\\0"}),
    ],
    ids=["text", "value", "key", "behind a backslash"],
)
def test_a_nul_character_fails_its_record_alone(
    engine: Engine, dsn: str, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    fine = Record("fine", "a \\u0000 b", {"k": "\\u0000", "l": "\\\\u0000"})  # no NUL, but the letters of an escape
    with PgVectorSink(dsn, "docs") as sink:
        report = fill(engine, sink, [fine, record, Record("b", "x")])
        assert (report.failed, report.written, sink.count()) == (1, 2, 2)
        assert {hit.id: hit.metadata for hit in sink.search(engine, "x")}["fine"] == fine.metadata
    assert "left out record 'nul': it holds a NUL character, which PostgreSQL does not store" in caplog.text


@pytest.mark.parametrize(
    "name", ["", "1docs", "my-docs", "ä", "x" * 49, "a.b.c", 'a"; DROP TABLE x; --', "millpond$rows"]
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no name for PostgreSQL"):
        PgVectorSink("postgresql://127.0.0.1:1/x", name)


def test_a_batch_is_written_whole_or_not_at_all(engine: Engine, dsn: str) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        sink.write(rows(10, 32))
        sink.client.execute("ALTER TABLE docs ADD CHECK (id <> 'r15')")
        with pytest.raises(SinkRejectedError, match="refused an upsert of 20 rows: .*violates check constraint"):
            sink.write(rows(20, 32))
        assert sink.count() == 10
        sink.write(rows(5, 32, 10))
        assert sink.count() == 15


def test_a_scan_pages_through_the_table_while_it_changes(
    engine: Engine, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond_pgvector.sink.PgVectorConnection.max_rows", 7)
    with PgVectorSink(dsn, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        sink.write(rows(50, 32))
        seen = []
        for row_id, record_id in sink.scan():
            assert row_id == point_id(record_id)
            seen.append(record_id)
            sink.delete_rows([row_id])
        assert sorted(seen) == sorted(f"r{i}" for i in range(50)) and sink.count() == 0


@pytest.mark.parametrize(
    ("datatype", "kind"), [("float32", "vector_cosine"), ("float16", "halfvec_cosine"), ("bit", "bit_hamming")]
)
def test_an_index_is_built_after_a_run_and_used(engine: Engine, dsn: str, datatype: str, kind: str) -> None:
    sink = PgVectorSink(dsn, "docs", dimensions=[16, 384], datatype=datatype, index="hnsw")
    records = [Record(f"r{n}", f"text {n}", {"rare": n % 60 == 0}) for n in range(300)]
    fill(engine, sink, records)
    exact = [hit.id for hit in sink.search(engine, "text 7", k=10, candidates=300)]
    sink.close()
    with psycopg.connect(dsn) as connection:
        found = dict(
            connection.execute(
                "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'docs' AND schemaname = current_schema()"
            ).fetchall()
        )
        assert f"USING hnsw (d16 {kind}_ops)" in found["docs_d16_hnsw"]
        assert "USING gin (metadata jsonb_path_ops)" in found["docs_metadata_gin"]
    with PgVectorSink(
        f"{dsn}%20-c%20enable_seqscan%3Doff%20-c%20enable_sort%3Doff%20-c%20enable_bitmapscan%3Doff", "docs"
    ) as sink:
        plan = sink.client.execute(
            SQL("EXPLAIN SELECT pk FROM docs ORDER BY {} LIMIT 5").format(
                (sink.count(), sink.open(), sink._driver._distance(16, np.ones(16, np.float32)))[2]
            )
        ).fetchall()
        assert "docs_d16_hnsw" in str(plan)
        # The graph is left only when as many rows are found as were asked for, also behind a filter.
        assert [hit.id for hit in sink.search(engine, "text 7", k=10, candidates=300)] == exact
        found = sink.search(engine, "text 7", k=5, candidates=5, filter={"rare": True})
        assert {hit.id for hit in found} == {"r0", "r60", "r120", "r180", "r240"}
        sink.create_index()  # once more, which changes nothing


def test_an_index_that_cannot_be_built_is_said_in_the_log(
    engine: Engine, records: list[Record], dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    with PgVectorSink(dsn, "docs", index="hnsw") as sink:
        fill(engine, sink, records)
        sink.client.execute("ALTER TABLE docs ALTER d384 TYPE vector")
    assert "refused an index" in caplog.text and "every row is stored" in caplog.text
    with PgVectorSink(dsn, "docs") as again:
        assert again.count() == 12


@pytest.mark.parametrize("condition", [{"a\0": 1}, {"a": "\0"}, {"a": ["b", "\0"]}, {"a\0": {"gt": 1}}], ids=repr)
def test_a_nul_character_in_a_filter_is_refused(
    engine: Engine, records: list[Record], dsn: str, condition: dict[str, Any]
) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[64]) as sink:
        fill(engine, sink, records)
        for use in (lambda: sink.delete(filter=condition), lambda: sink.search(engine, "x", filter=condition)):
            with pytest.raises(InvalidRequestError, match="holds a NUL character, which PostgreSQL does not store"):
                use()
        sink.delete(["a\0b"])  # no record can have this id
        assert sink.count() == len(records)


def test_a_filter_of_the_database_is_passed_on(engine: Engine, records: list[Record], dsn: str) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[64, 384]) as sink:
        fill(engine, sink, records)
        hits = sink.search(engine, "anything", filter=SQL("(metadata->>'n')::int < 3 AND id LIKE 'doc-%'"))
        assert {hit.id for hit in hits} == {"doc-0", "doc-1", "doc-2"}
        with pytest.raises(SinkError, match="refused a search: syntax error"):
            sink.search(engine, "anything", filter=SQL("this is (no condition"))
        with pytest.raises(
            InvalidRequestError, match="filter is of type str; pass a dict of metadata, or psycopg.sql.SQL"
        ):
            sink.search(engine, "anything", filter="n < 3")  # type: ignore[arg-type]
        sink.delete(filter=SQL("(metadata->>'n')::int < 3"))
        assert sink.count() == 9


@pytest.mark.parametrize("comment", [None, "my documents", "millpond", "millpond of mine"])
def test_a_foreign_table_is_left_alone(engine: Engine, records: list[Record], dsn: str, comment: str | None) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE docs (pk uuid PRIMARY KEY, d384 vector(384))")
        if comment is not None:
            connection.execute(SQL("COMMENT ON TABLE docs IS {}").format(comment))
        sink = PgVectorSink(dsn, "docs")
        with pytest.raises(FingerprintMismatchError, match="was not made by millpond|cannot read"):
            fill(engine, sink, records)
        with pytest.raises(FingerprintMismatchError):
            sink.search(engine, "anything")
        sink.close()
        assert connection.execute("SELECT count(*) FROM docs").fetchone() == (0,)


def test_all_that_create_a_table_and_the_extension_at_once_get_it(engine: Engine, postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.address(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE fresh")
    place = postgres.address().replace("/postgres?", "/fresh?")
    sinks = [PgVectorSink(place, f"docs{n % 2}", dimensions=[32]) for n in range(4)]
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def run(sink: PgVectorSink) -> None:
        try:
            start.wait()
            sink.prepare(engine.spec)
            sink.write(rows(200, 32))  # the same rows
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(sink,)) for sink in sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and [sink.count() for sink in sinks] == [200] * 4
    for sink in sinks:
        sink.close()


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://user:hunter2@host/db",
        "postgresql://host/db?password=hunter2",
        "host=h password=hunter2",
        "host=h sslpassword=hunter2",
        "hunter2",
        "postgresql://user:hunter2@host:x:y/db?z",
        "host='hunter2",
        "",
    ],
)
def test_a_string_with_a_secret_is_refused_and_not_shown(dsn: str) -> None:
    with pytest.raises(InvalidRequestError, match="PGUSER, PGPASSWORD and PGPASSFILE") as caught:
        PgVectorSink(dsn, "docs")
    assert "hunter2" not in str(caught.value) and caught.value.__cause__ is None
    assert "hunter2" not in "".join(map(str, [caught.value.__context__ or ""]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": "langchain"}, "fields='langchain': .* pass fields='plain'"),
        ({"datatype": "int8"}, "datatype='int8': .* pass datatype='float32', or one of 'float16', 'bit'"),
        ({"index": "ivfflat"}, "index='ivfflat': .* pass index=None, or one of 'hnsw'"),
        ({"timeout": 0}, "timeout=0 must be a number of seconds above 0"),
        ({"timeout": float("nan")}, "timeout=nan must be a number of seconds above 0"),
        ({"timeout": "60"}, "timeout='60' must be a number of seconds above 0"),
        ({"timeout": 1e300}, "timeout=1e"),
        ({"hybrid": True}, "this sink has no option 'hybrid'"),
    ],
)
def test_options_that_it_does_not_have_are_refused(
    options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch)
    with pytest.raises(InvalidRequestError, match=message):
        open_sink("pgvector+postgresql://127.0.0.1:1/x#docs", **options)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the entry point known, whether or not the package is installed."""
    from importlib.metadata import EntryPoint

    point = EntryPoint("pgvector", "millpond_pgvector:sink_from_url", "millpond.sinks")
    monkeypatch.setattr("millpond.ingest.sinks.database.entry_points", lambda group: [point])


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_url_opens_a_table(
    engine: Engine, records: list[Record], dsn: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch)
    place = dsn.replace("postgresql", scheme)
    sink = open_sink(f"pgvector+{place}#docs", dimensions=[64, 384], datatype="float16", timeout=5)
    assert isinstance(sink, PgVectorSink)
    with sink:
        assert repr(sink) == f"PgVectorSink({place!r}, 'docs', dimensions=(64, 384), fields=None)"
        fill(engine, sink, records)
        assert sink.search(engine, "what moves blood around the body?", k=1)[0].id == "doc-4"


@pytest.mark.parametrize(("scheme", "location"), [("postgresql", "host/db"), ("http", "//host"), ("path", "x")])
def test_urls_of_other_schemes_are_refused(scheme: str, location: str) -> None:
    with pytest.raises(
        InvalidRequestError, match="does not name a PostgreSQL; write pgvector.postgresql://host/db#docs"
    ):
        sink_from_url(scheme, location, "docs")


@pytest.mark.slow
def test_a_killed_writer_loses_no_row_that_was_acknowledged(engine: Engine, dsn: str, tmp_path: Path) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        program = (
            "import sys, numpy as np\n"
            "from millpond.ingest import Record, WriteBatch, point_id\n"
            "from millpond_pgvector import PgVectorSink\n"
            "sink = PgVectorSink(sys.argv[1], 'docs', dimensions=[32])\n"
            "sink.manifest = sink.open()\n"
            "for n in range(int(sys.argv[2]), 10**9, 50):\n"
            "    records = [Record(f'r{i}', f'text {i}') for i in range(n, n + 50)]\n"
            "    ids = [point_id(record.id) for record in records]\n"
            "    vectors = np.full((50, 32), 32 ** -0.5, np.float32)\n"
            "    sink.write(WriteBatch(records=records, ids=ids, vectors={32: vectors}))\n"
            "    print(n + 50, flush=True)\n"
        )
        done, random = 0, np.random.default_rng(0)
        for _ in range(20):
            arguments = [sys.executable, "-c", program, dsn, str(done)]
            with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
                assert writer.stdout is not None
                done = int(writer.stdout.readline())
                time.sleep(float(random.uniform(0, 0.1)))
                writer.send_signal(signal.SIGKILL)
                for line in writer.stdout:
                    done = int(line)
            others = "SELECT FROM pg_stat_activity WHERE datname = 'postgres' AND pid <> pg_backend_pid()"
            while sink.client.execute(others).rowcount:  # the server may finish what it has received
                time.sleep(0.01)
            stored = {record_id for _, record_id in sink.scan()}
            assert stored >= {f"r{i}" for i in range(done)} and len(stored) % 50 == 0
            assert len(stored) <= done + 50 and sink.count() == len(stored)
