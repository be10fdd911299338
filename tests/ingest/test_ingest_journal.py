"""The journal: what a run notes, what the next one skips, and a journal file that cannot be used."""

import contextlib
import sqlite3

import pytest
from tests.ingest.crashes import Countdown, Crash, CrashingSink, Refusing, Words, crash_at, memory, run, small, some
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.errors import JournalError
from millpond.ingest import Record, Rejected, StopRequest


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "journal"


def test_a_second_run_writes_only_what_is_new_or_changed(engine, journal):
    client = memory()
    run(some(20), engine, CrashingSink(client), journal=journal)
    sink = CrashingSink(client)
    source = some(22)
    source[3] = Record("r3", "another text", {"n": 3})
    source[5] = Record("r5", "text 5", {"n": 50})
    report = run(source, engine, sink, journal=journal)
    assert sorted(sink.written) == ["r20", "r21", "r3", "r5"]
    assert (report.unchanged, report.cached, report.embedded, report.written) == (18, 18, 4, 4)
    assert sink.stored == {(record.id, 0): record.text for record in source}
    sink = CrashingSink(client)
    assert run(source, engine, sink, journal=journal, resume=False).written == 22


def test_the_smallest_change_of_text_or_metadata_is_one(engine, journal):
    versions = [
        ("t", {}),
        ("t ", {}),
        ("t", {"k": 1}),
        ("t", {"k": 1.5}),
        ("t", {"k": True}),
        ("t", {"k": "1"}),
        ('t\0{"k": 1}', {}),
    ]
    client = memory()
    for text, metadata in [*versions, versions[0]]:
        assert run([Record("a", text, metadata)], engine, CrashingSink(client), journal=journal).written == 1
    run([Record("b", "t", {"k": 1, "l": 2})], engine, CrashingSink(client), journal=journal)
    again = run([Record("b", "t", {"l": 2, "k": 1})], engine, CrashingSink(client), journal=journal)
    assert again.unchanged == 1


@pytest.mark.parametrize(
    ("method", "calls", "after"),
    [
        ("write", 0, True),
        ("write", 1, False),
        ("write", 1, True),
        ("write", 3, False),
        ("add", 0, True),
        ("add", 1, False),
        ("add", 2, True),
        ("invalidate", 0, False),
        ("invalidate", 0, True),
        ("invalidate", 1, True),
    ],
)
def test_a_record_whose_first_version_was_overwritten_before_a_crash_is_written_again(
    engine, journal, method, calls, after
):
    """The journal may say "one" while the collection has "two" already."""
    client = memory()
    source = [Record("a", "one"), Record("a", "two"), Record("a", "three")]
    sink = CrashingSink(client)
    with small(1):
        try:
            if method == "write":
                sink.upserts = Countdown(calls, after=after)
                run(source, engine, sink, journal=journal)
            else:
                with crash_at(method, calls, after=after):
                    run(source, engine, sink, journal=journal)
        except Crash:
            pass
        run(source[:1], engine, CrashingSink(client), journal=journal)
    assert CrashingSink(client).stored == {("a", 0): "one"}


def test_blank_records_are_deleted_once_and_written_when_they_are_wanted(engine, journal):
    client = memory()
    run([Record("a", "text"), Record("b", "text")], engine, CrashingSink(client), journal=journal)
    sink = CrashingSink(client)
    blank = [Record("a", " "), Record("b", "text")]
    for deleted in (1, 0):
        sink.deletes = Countdown(9)
        report = run(blank, engine, sink, journal=journal)
        assert sink.deletes.calls == 9 - deleted
        assert (report.blank, report.unchanged, report.written) == (1, 1, 0) and set(sink.stored) == {("b", 0)}
    assert run(blank, engine, sink, journal=journal, keep_blank=True).written == 1
    assert set(sink.stored) == {("a", 0), ("b", 0)}
    run(blank, engine, sink, journal=journal)
    assert set(sink.stored) == {("b", 0)}


def test_a_line_without_a_record_and_a_refused_one_are_tried_again(engine, journal):
    client = memory()
    source = [*some(3), Record("bad", "bad"), Rejected(where="x:1", reason="no record")]
    for written in (3, 0):
        report = run(source, engine, Refusing(client), journal=journal)
        assert (report.failed, report.written) == (2, written)
    source[3] = Record("bad", "good now")
    assert run(source, engine, Refusing(client), journal=journal).written == 1


def test_one_journal_serves_several_collections(engine, journal, tmp_path):
    class Named(CrashingSink):
        def __init__(self, client, name):
            super().__init__(client)
            self._where = name

        target = property(lambda self: self._where)

    clients = {name: memory() for name in ("one", "two")}
    for name, client in clients.items():
        assert run(some(3), engine, Named(client, name), journal=journal).written == 3
    for name, client in clients.items():
        assert run(some(3), engine, Named(client, name), journal=journal).unchanged == 3
    folder = write_checkpoint(tmp_path / "other", "bert", seed=1)
    with Engine(folder, dtype="float32", device="cpu") as other:
        assert run(some(3), other, Named(memory(), "one"), journal=journal).written == 3


def test_rows_that_were_deleted_behind_the_journals_back_are_written_again(engine, journal):
    client = memory()
    run(some(5000), engine, CrashingSink(client), journal=journal)  # several pages of entries
    CrashingSink(client).delete(["r200", "r201", "r4999"])
    sink = CrashingSink(client)
    assert run(some(5000), engine, sink, journal=journal).written == 3
    assert sink.written == ["r200", "r201", "r4999"] and len(sink.stored) == 5000


def damaged(path, what):
    if what == "folder":
        path.mkdir()
    elif isinstance(what, bytes):
        path.write_bytes(what)
    else:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.executescript(what)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("CREATE TABLE t (x)", "is a database of another application"),
        (b"a file of notes, which nobody wants to lose\n" * 40, "is not a journal of millpond, or is damaged"),
        ("folder", "is not a file"),
        (b"SQLite format 3\0", "is not a journal of millpond, or is damaged"),
        (
            f"PRAGMA application_id={0x4D504A4C}; PRAGMA user_version=99",
            "schema version 99, and this .* reads up to 2",
        ),
    ],
    ids=["foreign", "text", "folder", "short", "newer"],
)
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(engine, journal, what, message):
    damaged(journal, what)
    before = None if what == "folder" else journal.read_bytes()
    client = memory()
    with pytest.raises(JournalError, match=message) as caught:
        run(some(1), engine, CrashingSink(client), journal=journal)
    assert str(journal) in str(caught.value) and "cache" not in str(caught.value)
    assert not client and (what == "folder" or journal.read_bytes() == before)


def test_a_damaged_page_stops_the_run_before_anything_is_skipped(engine, journal):
    client = memory()
    run(some(400), engine, CrashingSink(client), journal=journal)
    content = bytearray(journal.read_bytes())
    content[2 * 4096 :] = b"\xff" * (len(content) - 2 * 4096)
    journal.write_bytes(content)
    with pytest.raises(JournalError, match="damaged"):
        run(some(400), engine, CrashingSink(client), journal=journal)


@pytest.mark.parametrize("method", ["add", "invalidate"])
def test_a_journal_that_fails_stops_the_run_and_nothing_is_skipped_wrongly(engine, journal, method):
    client = memory()
    run(some(4), engine, CrashingSink(client), journal=journal)
    changed = [Record(f"r{number}", f"new {number}") for number in range(8)]
    failure = JournalError("the journal cannot grow: the disk is full")
    with small(2), crash_at(method, 1, error=failure), pytest.raises(JournalError, match="disk is full"):
        run(changed, engine, CrashingSink(client), journal=journal)
    with small(2):
        run(changed, engine, CrashingSink(client), journal=journal)
    assert CrashingSink(client).stored == {(record.id, 0): record.text for record in changed}


def test_the_journal_is_readable_by_its_owner_only_and_holds_no_text(engine, journal):
    run([Record("a", "a secret text")], engine, CrashingSink(memory()), journal=journal)
    assert journal.stat().st_mode & 0o777 == 0o600
    assert b"secret" not in journal.read_bytes()


def chunks(*counts):
    """Records r0, r1, ... of so many pieces each."""
    return [
        Record(f"r{index}", " ".join(f"w{index}x{count}x{n}" for n in range(3 * count)))
        for index, count in enumerate(counts)
    ]


@pytest.mark.parametrize("with_journal", [True, False], ids=["journal", "no journal"])
def test_a_text_that_became_shorter_leaves_no_piece_behind(engine, journal, with_journal):
    client = memory()
    options = {"journal": journal, "chunking": Words()} if with_journal else {"chunking": Words()}
    for counts in ((5, 1, 200), (2, 3, 1), (1, 1, 70), (4, 1, 2)):
        run(chunks(*counts), engine, CrashingSink(client), **options)
        wanted = {(f"r{index}", number) for index, count in enumerate(counts) for number in range(count)}
        assert set(CrashingSink(client).stored) == wanted


@pytest.mark.parametrize(
    ("point", "after", "counts"),
    [
        ("write", False, (5, 2, 3)),
        ("write", True, (5, 2, 2)),
        ("write", True, (5, 8, 2)),
        ("delete", False, (5, 2, 2)),
        ("delete", True, (5, 2, 3)),
        ("entry", False, (5, 8, 2)),
        ("entry", True, (2, 5, 1)),
        ("entry", False, (5, 2, 2)),
    ],
    ids=str,
)
def test_a_crash_between_the_write_and_the_deletion_leaves_no_piece_behind(engine, journal, point, after, counts):
    first, second, third = counts
    client = memory()
    run(chunks(first), engine, CrashingSink(client), journal=journal, chunking=Words())
    sink = CrashingSink(client)
    try:
        if point == "entry":
            with crash_at("add", 0, after=after):
                run(chunks(second), engine, sink, journal=journal, chunking=Words())
        else:
            setattr(sink, {"write": "upserts", "delete": "deletes"}[point], Countdown(0, after=after))
            run(chunks(second), engine, sink, journal=journal, chunking=Words())
    except Crash:
        pass
    run(chunks(third), engine, CrashingSink(client), journal=journal, chunking=Words())
    assert set(CrashingSink(client).stored) == {("r0", number) for number in range(third)}


@pytest.mark.parametrize("after", [0, 4, 19])
def test_a_run_that_is_stopped_has_marked_what_is_written_and_the_next_one_completes_it(engine, journal, after):
    client, stop = memory(), StopRequest()

    def source():
        for number, record in enumerate(some(20)):
            if number == after:
                stop.set()
            yield record

    sink = CrashingSink(client)
    with small(2):
        report = run(source(), engine, sink, journal=journal, stop=stop, sync=True, verify=True)
    assert report.stopped and report.written == len(sink.stored) <= after + 1
    assert report.verification is None and report.deleted == 0
    with contextlib.closing(sqlite3.connect(journal)) as database:
        assert database.execute("SELECT COUNT(*) FROM records").fetchone() == (len(sink.stored),)
    again = CrashingSink(client)
    with small(2):
        report = run(some(20), engine, again, journal=journal)
    assert not report.stopped and len(again.written) == 20 - len(sink.written)
    assert len(again.stored) == 20


@pytest.mark.parametrize("calls", [0, 2])
def test_a_stop_during_a_write_keeps_what_was_acknowledged(engine, journal, calls):
    client, stop = memory(), StopRequest()
    sink = CrashingSink(client)
    real = sink.upserts

    def upserts(call, batch):
        nonlocal calls
        if calls == 0:
            stop.set()
        calls -= 1
        return real(call, batch)

    sink.upserts = upserts
    with small(2):
        report = run(some(40), engine, sink, journal=journal, stop=stop)
    assert report.stopped and report.written == len(sink.stored) < 40
    with small(2):
        assert run(some(40), engine, CrashingSink(client), journal=journal).unchanged == report.written
    assert len(CrashingSink(client).stored) == 40


@pytest.mark.parametrize("blank", [False, True], ids=["sync", "blank"])
def test_pieces_whose_rows_were_deleted_with_their_record_are_written_again(journal, engine, blank):
    # The rows of others hide from the count, and from the look at the first and last ids, that one is missing.
    others = [Record(f"{side}{number:03d}", "text") for number in range(200) for side in "az"]
    first = Record("m", "one", {"chunk": 0, "chunk_start": 0, "chunk_end": 3})
    pieces = [first, Record("m", "two", chunk=1), Record("m", "three", chunk=2)]
    sink = CrashingSink(memory())
    run([*others, *pieces], engine, sink, chunker=Words(), journal=journal)
    gone = [Record("m", " ")] if blank else []
    run([*others, *gone], engine, sink, chunker=Words(), journal=journal, sync=not blank)
    assert ("m", 1) not in sink.stored
    run([Record(f"new {number}", "text") for number in range(5)], engine, sink, chunker=Words())
    run([*others, *pieces], engine, sink, chunker=Words(), journal=journal)
    assert [sink.stored.get(("m", number)) for number in range(3)] == ["one", "two", "three"]
