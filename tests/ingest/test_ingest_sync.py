"""sync: the rows of records that the source no longer has are deleted, and nothing else."""

import pytest
from tests.ingest.crashes import Countdown, Crash, CrashingSink, Refusing, Words, crash_at, memory, run, small

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest import Record, Rejected, point_id


def some(*numbers):
    return [Record(f"r{number}", f"text {number}") for number in numbers]


@pytest.mark.parametrize(("with_journal", "page"), [(True, 3), (False, 512)])
def test_rows_without_a_record_in_the_source_are_deleted(engine, tmp_path, with_journal, page):
    client = memory()
    options = {"journal": tmp_path / "j"} if with_journal else {}
    run(some(*range(20)), engine, CrashingSink(client), **options)
    with small(2048, page=page):
        report = run(some(*range(5, 22)), engine, CrashingSink(client), sync=True, **options)
    assert report.deleted == 5
    assert {key for key, _ in CrashingSink(client).stored} == {f"r{number}" for number in range(5, 22)}
    report = run(some(*range(5, 22)), engine, CrashingSink(client), sync=True, **options)
    assert report.deleted == 0
    assert run(some(*range(22)), engine, CrashingSink(client), **options).written == (5 if with_journal else 22)


def test_a_record_that_comes_back_is_written_again_also_after_a_crash(engine, tmp_path):
    for number, (method, after) in enumerate(
        [("delete", False), ("delete", True), ("remove", False), ("remove", True)]
    ):
        client, journal = memory(), tmp_path / str(number)
        # Rows of others, so that their number does not show that one is missing.
        foreign = memory()
        run(some(*range(100, 110)), engine, CrashingSink(foreign))
        run(some(*range(9)), engine, CrashingSink(client), journal=journal)
        client["docs"][1].update(foreign["docs"][1])
        sink = CrashingSink(client)
        try:
            if method == "delete":
                sink.deletes = Countdown(0, after=after)
                run(some(0, *range(2, 9)), engine, sink, journal=journal, sync=True, sync_max=1)
            else:
                with crash_at("remove", 0, after=after):
                    run(some(0, *range(2, 9)), engine, sink, journal=journal, sync=True, sync_max=1)
        except Crash:
            pass
        run(some(*range(9)), engine, CrashingSink(client), journal=journal)
        assert {f"r{each}" for each in range(9)} <= {key for key, _ in CrashingSink(client).stored}, (method, after)


def test_records_that_were_left_out_or_are_refused_keep_their_rows(engine, tmp_path):
    client = memory()
    run(some(1, 2, 3, 4), engine, Refusing(client))
    source = [*some(1), Record("r2", "bad"), Rejected(where="x:3", reason="no text", record_id="r3")]
    report = run(source, engine, Refusing(client), sync=True)
    assert (report.deleted, report.failed) == (1, 2)
    assert {key for key, _ in CrashingSink(client).stored} == {"r1", "r2", "r3"}


def test_a_line_whose_id_is_not_known_deletes_nothing(engine, caplog):
    client = memory()
    run(some(1, 2, 3), engine, CrashingSink(client))
    report = run([*some(1), Rejected(where="x:2", reason="torn")], engine, CrashingSink(client), sync=True)
    assert report.deleted == 0 and len(CrashingSink(client).stored) == 3
    assert "sync=True deleted nothing: 1 records of the source could not be read" in caplog.text


def test_an_empty_source_is_refused(engine):
    client = memory()
    run(some(1), engine, CrashingSink(client))
    with pytest.raises(SinkError, match=r"would delete 1 of the 1 rows .* no record of the source was stored"):
        run([], engine, CrashingSink(client), sync=True, sync_max=1)
    assert len(CrashingSink(client).stored) == 1
    assert run([], engine, CrashingSink(memory()), sync=True).deleted == 0


def test_a_source_that_fails_in_the_middle_deletes_nothing(engine):
    client = memory()
    run(some(1, 2, 3), engine, CrashingSink(client))

    def source():
        yield from some(1)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        run(source(), engine, CrashingSink(client), sync=True)
    assert len(CrashingSink(client).stored) == 3


def test_every_piece_of_a_text_is_deleted(engine, tmp_path):
    long = Record("long", " ".join(f"w{number}" for number in range(40)))
    client = memory()
    run([long, *some(1)], engine, CrashingSink(client), chunker=Words(), journal=tmp_path / "j")
    with pytest.raises(SinkError, match="14 of the 15 rows"):
        run(some(1), engine, CrashingSink(client), chunker=Words(), journal=tmp_path / "j", sync=True)
    report = run(some(1), engine, CrashingSink(client), chunker=Words(), journal=tmp_path / "j", sync=True, sync_max=1)
    assert report.deleted == 14 and set(CrashingSink(client).stored) == {("r1", 0)}


def test_a_sink_that_cannot_be_read_is_refused_before_anything_is_read(engine):
    class Plain:
        dimensions = None

        def prepare(self, spec): ...
        def write(self, batch): ...
        def close(self): ...

    for name in ("sync", "verify"):
        with pytest.raises(InvalidRequestError, match=f"{name}=True needs a sink whose rows can be read"):
            run(some(1), engine, Plain(), **{name: True})


def test_rows_that_a_framework_wrote_stay(engine, tmp_path):
    pytest.importorskip("millpond_qdrant")
    from qdrant_client import QdrantClient, models

    from millpond_qdrant import QdrantSink

    client = QdrantClient(":memory:")
    sink = QdrantSink(client, "docs")
    run(some(1, 2), engine, sink)
    own = "00000000-0000-4000-8000-000000000000"
    vector = {"d48": engine.embed(["of a framework"]).embeddings[0].tolist()}
    client.upsert("docs", [models.PointStruct(id=own, vector=vector, payload={"page_content": "x", "metadata": {}})])
    report = run(some(2), engine, sink, sync=True)
    assert report.deleted == 1
    assert {row_id for row_id, _ in sink.scan()} == {own, point_id("r2")}
