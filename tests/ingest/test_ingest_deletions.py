"""A run deletes a share of a collection at the most, and nothing if no record of its source was stored."""

import pytest
from tests.ingest.crashes import Countdown, Crash, CrashingSink, Words, memory, run, small, some

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest import Record, Rejected, StopRequest

UNREADABLE = [Rejected(where="x:1", reason="no text", record_id="package.json")]
BLANK = [Record("blank", " ")]


def blank(records, *ids):
    return [Record(each.id, " \n", each.metadata) if each.id in ids or not ids else each for each in records]


@pytest.mark.parametrize("journal", ["j", None])
@pytest.mark.parametrize(
    "source", [UNREADABLE, BLANK, [], UNREADABLE + BLANK], ids=["no text", "blank", "none", "both"]
)
def test_a_source_of_which_nothing_is_stored_deletes_nothing(engine, tmp_path, source, journal):
    client = memory()
    options = {} if journal is None else {"journal": tmp_path / journal}
    run(some(60), engine, CrashingSink(client), **options)
    with pytest.raises(SinkError, match=r"would delete 60 of the 60 rows .*no record of the source was stored"):
        run(source, engine, CrashingSink(client), sync=True, sync_max=1, **options)
    assert len(CrashingSink(client).stored) == 60


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("chunker", [None, Words(1)], ids=["whole", "chunked"])
def test_texts_that_are_all_blank_now_keep_their_rows_and_their_entries(engine, tmp_path, sync, chunker):
    client, options = memory(), {"journal": tmp_path / "j", "chunker": chunker}
    run(some(20), engine, CrashingSink(client), **options)
    stored = CrashingSink(client).stored
    for _ in range(2):
        with pytest.raises(SinkError, match=r"delete (20|40) of the \1 rows .*whose text is blank now"):
            run(blank(some(20)), engine, CrashingSink(client), sync=sync, **options)
        assert CrashingSink(client).stored == stored
    assert run(some(20), engine, CrashingSink(client), **options).unchanged == 20


@pytest.mark.parametrize("journal", ["j", None])
@pytest.mark.parametrize("what", ["gone", "blank"])
@pytest.mark.parametrize(("count", "share", "allowed"), [(30, 0.5, 30), (31, 0.5, 30), (1, 0, 0), (59, 1, 60)])
def test_a_run_deletes_at_most_a_share_of_the_rows(engine, tmp_path, what, count, share, allowed, journal):
    client = memory()
    options = {} if journal is None else {"journal": tmp_path / journal}
    run(some(60), engine, CrashingSink(client), **options)
    ids = [f"r{number}" for number in range(count)]
    kept = [each for each in some(60) if each.id not in ids]
    # New records do not make room for more deletions, and are written in any case.
    source = [*(kept if what == "gone" else blank(some(60), *ids)), *(Record(f"n{n}", "new") for n in range(100))]
    options |= {"sync": what == "gone", "sync_max": share}
    if count <= allowed:
        assert run(source, engine, CrashingSink(client), **options).deleted == count
    else:
        expected = f"would delete {count} of the 60 rows .*sync_max={share} allows {allowed}; .*a larger sync_max"
        with pytest.raises(SinkError, match=expected):
            run(source, engine, CrashingSink(client), **options)
    assert len(CrashingSink(client).stored) == 160 - (count if count <= allowed else 0)


@pytest.mark.parametrize("journal", ["j", None])
@pytest.mark.parametrize("killed", [False, True])
def test_a_refused_sync_is_refused_again_though_its_new_rows_are_there(engine, tmp_path, journal, killed):
    client = memory()
    options = {} if journal is None else {"journal": tmp_path / journal}
    run(some(60), engine, CrashingSink(client), **options)
    renamed = [Record(f"n{number}", "new") for number in range(61)]
    if killed:
        sink = CrashingSink(client)
        sink.upserts = Countdown(1, after=True)
        with pytest.raises(Crash), small(20):
            run(renamed, engine, sink, sync=True, **options)
    for _ in range(3):
        with pytest.raises(SinkError, match="and sync_max=0.5 allows 30"):
            run(renamed, engine, CrashingSink(client), sync=True, **options)
        run([], engine, CrashingSink(client), **options)
        run([Record("n1", "changed"), Record("n1", " "), Record("n2", "new")], engine, CrashingSink(client), **options)
    assert len(CrashingSink(client).stored) >= 120
    assert run(renamed, engine, CrashingSink(client), sync=True, sync_max=1, **options).deleted == 60
    assert run(renamed[:31], engine, CrashingSink(client), sync=True, **options).deleted == 30


def test_blank_and_absent_records_share_one_limit(engine):
    client = memory()
    run(some(10), engine, CrashingSink(client))
    source = blank(some(7), "r0", "r1", "r2")
    with pytest.raises(SinkError, match=r"6 of the 10 rows .*3 whose text is blank now, 3 that the source no longer"):
        run(source, engine, CrashingSink(client), sync=True)
    assert run(source, engine, CrashingSink(client), sync=True, sync_max=0.6).deleted == 6


@pytest.mark.parametrize("size", [1, 3, 2048])
def test_the_last_text_of_an_id_decides(engine, tmp_path, size):
    client = memory()
    run(some(9), engine, CrashingSink(client), journal=tmp_path / "j")
    source = [*blank(some(3)), *some(9, "other"), *blank(some(2)), Record("r0", "late")]
    with small(size):
        report = run(source, engine, CrashingSink(client), journal=tmp_path / "j")
    assert report.deleted == 1
    expected = {(each.id, 0): each.text for each in some(9, "other")} | {("r0", 0): "late"}
    del expected["r1", 0]
    assert CrashingSink(client).stored == expected
    again = [Record("r0", "late"), *blank(some(2))[1:]]
    assert run(again, engine, CrashingSink(client), journal=tmp_path / "j").written == 0


def test_a_record_that_is_first_written_and_then_blank_leaves_no_row(engine):
    client = memory()
    with small(1):
        run([*some(3), *blank(some(2))], engine, CrashingSink(client))
    assert set(CrashingSink(client).stored) == {("r2", 0)}


def test_blank_pieces_lose_their_own_rows_alone(engine, tmp_path):
    client = memory()
    pieces = [Record("m", text, {"chunk": n}, chunk=n) for n, text in enumerate(["one", "two", "three"])]
    run([*pieces, *some(9)], engine, CrashingSink(client), chunker=Words(), journal=tmp_path / "j")
    source = [Record("m", " "), pieces[1], Record("m", " ", chunk=2), *some(9)]
    run(source, engine, CrashingSink(client), chunker=Words(), journal=tmp_path / "j")
    assert {key for key in CrashingSink(client).stored if key[0] == "m"} == {("m", 1)}


def test_a_run_that_is_stopped_leaves_the_blank_rows_to_the_next(engine, tmp_path):
    client, stop = memory(), StopRequest()
    run(some(9), engine, CrashingSink(client), journal=tmp_path / "j")

    def source():
        yield from blank(some(9), "r0", "r1")
        stop.set()
        yield Record("x", "read last")

    with small(1, page=1):
        assert run(source(), engine, CrashingSink(client), journal=tmp_path / "j", stop=stop).stopped
    assert len(CrashingSink(client).stored) == 10  # what was read of a generator is written
    assert run(blank(some(9), "r0", "r1"), engine, CrashingSink(client), journal=tmp_path / "j").deleted == 2


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "0.5", float("nan"), None])
def test_a_share_that_is_none_is_refused_before_anything_is_read(engine, share):
    with pytest.raises(InvalidRequestError, match="sync_max=.* must be a number from 0 to 1"):
        run(iter([1 / 1]), engine, CrashingSink(memory()), sync_max=share)
