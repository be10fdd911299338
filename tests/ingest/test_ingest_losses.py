"""No form of a source empties a collection of any database: texts that are blank now, and records without a text."""

import json
from contextlib import nullcontext

import pytest
from tests.ingest.memory_sink import MemoryClient, MemorySink
from tests.ingest.postgres import running_server
from tests.pairwise import pairwise

from millpond.errors import SinkError
from millpond.ingest import Record, WriteBatch, ingest, open_sink, point_id

pytestmark = pytest.mark.contract

ROWS = 12
PLAIN = ("memory", "lancedb", "pgvector")  # which have one layout


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture
def opened(request, tmp_path):
    """Opens a sink of a database by its name; opened again, it has the same rows."""
    client, schema = MemoryClient(), []

    def open_(database, layout):
        if database == "memory":
            return MemorySink(client, "docs")
        pytest.importorskip(f"millpond_{database}")
        if database == "pgvector" and not schema:
            schema.append(request.getfixturevalue("server").schema())
        location = {"qdrant": "qdrant+path:", "milvus": "milvus+file:", "lancedb": "lancedb+path:"}.get(database)
        place = schema[0] if location is None else tmp_path / ("v.db" if database == "milvus" else "v")
        options = {} if database in PLAIN else {"fields": layout}
        return open_sink(f"{location or 'pgvector+'}{place}#docs", **options)

    return open_


def source(kind, texts, folder):
    """Records ``r0``, ``r1`` ... with these texts, as a source of a kind; a text that is ``None`` is not there."""
    rows = [{"id": f"r{n}", "name": "x"} | ({} if t is None else {"text": t}) for n, t in enumerate(texts)]
    path = folder / f"source.{kind}"
    if kind in ("jsonl", "json"):
        path.write_text("\n".join(map(json.dumps, rows)) if kind == "jsonl" else json.dumps(rows))
    elif kind == "folder":
        path.mkdir(exist_ok=True)
        for n, text in enumerate(texts):
            (path / f"{n}.txt").write_text(text or "")
    elif kind == "csv":
        path.write_text(
            "".join(f'{row["id"]},"{row.get("text", "")}"\n' for row in [{"id": "id", "text": "text"}, *rows])
        )
    elif kind == "records":
        return iter([Record(row["id"], row.get("text") or " ") for row in rows])
    elif kind == "dicts":
        return rows
    else:
        return table(kind, [row | {"text": row.get("text")} for row in rows], path)
    return path


def table(kind, rows, path):
    if kind == "datasets":
        return pytest.importorskip("datasets").Dataset.from_list(rows)
    if kind == "pandas":
        return pytest.importorskip("pandas").DataFrame(rows)
    arrow = pytest.importorskip("pyarrow")
    made = arrow.Table.from_pylist(rows, schema=arrow.schema({"id": arrow.string(), "text": arrow.string()}))
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(made, path)
        return path
    return made


@pairwise(
    kind=["jsonl", "json", "csv", "folder", "parquet", "arrow", "pandas", "datasets", "dicts", "records"],
    database=["memory", "qdrant", "milvus", "lancedb", "pgvector"],
    layout=["plain", "langchain", "llama_index"],
    case=["blank", "textless", "most are blank"],
    sync=[False, True],
    journal=[False, True],
)
def test_a_source_without_texts_deletes_nothing(engine, tmp_path, opened, kind, database, layout, case, sync, journal):
    options = {"journal": tmp_path / "j"} if journal else {}
    texts = [f"text {number}" for number in range(ROWS)]
    bad = {"blank": [" \t"] * ROWS, "textless": [None] * ROWS, "most are blank": [*texts[:3], *[" "] * (ROWS - 3)]}[
        case
    ]

    def run(texts, **more):
        sink = opened(database, layout)
        try:
            return ingest(
                source(kind, texts, tmp_path), engine=engine, sink=sink, show_progress=False, **options, **more
            )
        finally:
            sink.close()

    assert run(texts).written == ROWS
    gone = 9 if case == "most are blank" else ROWS
    # Elsewhere a record without a text holds no record, and its row is one that only a sync would delete.
    blank = case != "textless" or kind in ("csv", "folder", "records")
    refused = pytest.raises(SinkError, match=f"would delete {gone} of the {ROWS} rows")
    with refused if blank else nullcontext():
        report = run(bad, sync=sync)
        assert (report.failed, report.deleted) == (ROWS, 0)
    sink = opened(database, layout)
    sink.prepare(engine.spec)
    assert sink.count() == ROWS
    sink.close()
    assert run(texts).unchanged == (ROWS if journal else 0)


@pairwise(
    database=["memory", "qdrant", "milvus", "lancedb", "pgvector"],
    layout=["plain", "langchain", "llama_index"],
    what=["text", "metadata"],
)
def test_an_old_row_is_found_by_its_content_and_written_again(engine, tmp_path, opened, database, layout, what):
    """Another journal's run stands for a copy that was restored: the collection has another id, and two old rows."""
    new = [
        Record(f"r{n}", f"text {n}", {"lang": "en", "n": n, "tags": ["a"], "none": None, "f": 1.5}) for n in range(ROWS)
    ]
    old = [
        Record(each.id, "old", each.metadata) if what == "text" else Record(each.id, each.text, {"n": 7})
        for each in new
    ]

    def run(records, **more):
        sink = opened(database, layout)
        try:
            return ingest(records, engine=engine, sink=sink, show_progress=False, **more)
        finally:
            sink.close()

    assert run(new, journal=tmp_path / "j", verify=True).verification.good
    run(old[3:5], journal=tmp_path / "other")
    report = run(new, journal=tmp_path / "j", verify=True)
    assert (report.unchanged, report.written) == (ROWS - 2, 2) and report.verification.good
    assert run(new, journal=tmp_path / "j").unchanged == ROWS
    sink = opened(database, layout)
    sink.prepare(engine.spec)
    sink.write(batch_of(engine, sink, old[6:8]))  # behind the journal's back, without an id of a run
    sink.close()
    found = run(new, journal=tmp_path / "j", verify=True).verification
    assert (found.different, found.missing, found.compared) == (2, 0, ROWS)
    assert run(new, journal=tmp_path / "j", verify=True).verification.good


def batch_of(engine, sink, records):
    vectors = engine.embed([record.text for record in records]).embeddings
    (width,) = sink.manifest.dimensions
    ids = [point_id(record.id) for record in records]
    return WriteBatch(records=records, ids=ids, vectors={width: vectors})
