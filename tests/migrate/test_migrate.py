"""Migrations over a folder of Qdrant: what is copied, what searches and writers see, going back, finishing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.migrate.engines import Scattered, Turned, WordModel

from millpond.errors import FingerprintMismatchError, InvalidRequestError, SinkError, SinkUnavailableError
from millpond.ingest import Record, RetryPolicy, ingest, point_id
from millpond.ingest.sinks.driver import CollectionDriver
from millpond.ingest.sinks.reader import CollectionReader
from millpond.ingest.sinks.succession import Succession
from millpond.migrate import migration as module
from millpond.migrate.change import Change
from millpond.migrate.migration import Migration
from millpond.migrate.outcome import Outcome
from millpond.migrate.plan import plan, status
from millpond.migrate.row_copy import CopyOptions, Pass, RowCopy
from millpond.testing.sink import fill, records

sinks = pytest.importorskip("millpond_qdrant")
QdrantDriver = pytest.importorskip("millpond_qdrant.driver").QdrantDriver

OLD, NEW = WordModel("old"), WordModel("new", dimensions=64)
QUESTION = "how to mend zip archives"


class Places:
    """Sinks of one collection in a folder, as another program opens them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[Any] = []

    def __call__(self, collection: str = "docs", **options: Any) -> Any:
        sink = sinks.QdrantSink(self.folder, collection, **options)
        self.opened.append(sink)
        return sink


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Places]:
    places = Places(tmp_path / "q")
    yield places
    for sink in places.opened:
        sink.close()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers follow at once, so that finish need not wait for them."""
    monkeypatch.setattr(module, "SETTLED", 0.0)
    monkeypatch.setattr(module, "IN_FLIGHT", 0.0)


def filled(place: Places, rows: list[Record] | None = None, **options: Any) -> Any:
    sink = place(**options)
    fill(sink, OLD, records() if rows is None else rows, options.get("dimensions", (384,)))
    return sink


def run(head: Any, engine: WordModel = NEW, **options: Any) -> Outcome:
    bridge = options.pop("bridge", False)
    copying = options.pop("options", None)
    return Migration(head, Change(spec=engine.spec, **options), options=copying).run(engine, bridge=bridge)  # type: ignore[arg-type]


def contents(sink: Any, engine: WordModel) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Every row, after its vectors were compared with the engine's."""
    widths = sink.open().dimensions
    rows = sink.read_rows([row_id for row_id, _ in sink.scan()], widths=widths)
    for row in rows.values():
        for width in widths:
            expected = engine.embed([row.text], dimensions=width, normalize=True).embeddings[0]
            assert float(row.vectors[width] @ expected) == pytest.approx(1, abs=1e-5)
    return {row_id: (row.record_id, row.text, row.metadata) for row_id, row in rows.items()}


def test_every_row_is_there_with_the_new_vectors_and_the_old_text(place: Places) -> None:
    before = contents(filled(place), OLD)
    outcome = run(place())
    assert (outcome.phase, outcome.rows, outcome.written, outcome.passes) == ("live", 48, 48, 2)
    reader = place()
    assert contents(reader, NEW) == before
    assert reader.open().model == "new" and reader.open().dimensions == (64,) and reader.count() == 48
    expected = {record.text for record in records() if "zip" in record.text}
    assert {hit.text for hit in reader.search(NEW, "zip archives", k=6)} == expected


def test_the_name_stays_through_two_migrations_and_their_ends(place: Places) -> None:
    filled(place)
    first = run(place())
    assert Migration(place()).finish().phase == "finished"
    assert place().collections() == ["docs", first.serving]
    second = run(place(), WordModel("third"))
    assert second.other == first.serving and second.rows == 48
    Migration(place()).finish()
    assert place().collections() == ["docs", second.serving]
    assert place().count() == 48 and place("docs").open().model == "third"
    raw = place().sibling("docs")
    assert raw.count() == 0  # what stays by the name is empty
    raw.close()


def test_readers_and_writers_follow_without_being_opened_again(
    place: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = filled(place)
    assert len(reader.search(OLD, QUESTION)) == 10
    run(place())
    former = [hit.id for hit in reader.search(OLD, QUESTION)]  # has not read the manifest again
    monkeypatch.setattr(CollectionDriver, "trusted", 0.0)
    with caplog.at_level(logging.WARNING):
        assert [hit.id for hit in reader.search(OLD, QUESTION)] == former
        reader.search(OLD, QUESTION)
    assert sum("migrated to new" in each.message for each in caplog.records) == 1
    assert len(reader.search(NEW, QUESTION)) == 10
    with pytest.raises(FingerprintMismatchError, match="was built by new"):
        reader.search(WordModel("other"), QUESTION)
    reader.delete([records()[0].id])
    assert reader.count() == 47 and place().count() == 47
    Migration(place()).finish()
    with pytest.raises(FingerprintMismatchError, match="was built by new"):
        reader.search(OLD, QUESTION)


def test_a_run_of_the_old_model_ends_at_the_cut_over_and_mixes_nothing(place: Places) -> None:
    writer = filled(place)
    run(place())
    with pytest.raises(FingerprintMismatchError, match="was migrated to new .* run it again with that model"):
        fill_on(writer, OLD, [Record("late", "a late text")])
    with pytest.raises(FingerprintMismatchError, match="built by new"):
        ingest([Record("late", "a late text")], engine=OLD, sink=place(), show_progress=False)  # type: ignore[arg-type]
    report = ingest([Record("late", "a late text")], engine=NEW, sink=place(), show_progress=False)  # type: ignore[arg-type]
    assert report.written == 1 and place().count() == 49
    contents(place(), NEW)


def fill_on(sink: Any, engine: WordModel, rows: list[Record]) -> None:
    """Write without preparing again."""
    from millpond.ingest.sinks.batch import WriteBatch

    vectors = engine.embed([row.text for row in rows], normalize=True).embeddings
    sink.write(WriteBatch(records=rows, ids=[point_id(row.id) for row in rows], vectors={vectors.shape[1]: vectors}))


class Meddling:
    """Changes the old collection between the passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *changes: Any) -> None:
        self.changes = list(changes)
        passed = RowCopy.run

        def run(copy: RowCopy) -> Any:
            done = passed(copy)
            if self.changes:
                self.changes.pop(0)()
            return done

        monkeypatch.setattr(RowCopy, "run", run)


def test_what_is_written_changed_and_deleted_meanwhile_is_mirrored(
    place: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_ROWS", 0)
    writer = filled(place)
    many = [Record(f"more/{number}", f"text number {number}", {"n": number}) for number in range(400)]
    last = Record(records()[0].id, "another text", {"n": -1})

    def sealed() -> None:
        with pytest.raises(SinkUnavailableError, match=r"takes no changes for at most \d+ s") as refused:
            fill_on(writer, OLD, [Record("late", "x")])
        assert refused.value.retry_after

    def replaced() -> None:
        fill_on(writer, OLD, [last])
        writer.delete([records()[1].id])

    Meddling(
        monkeypatch,
        lambda: fill_on(writer, OLD, many),
        replaced,
        lambda: None,
        lambda: None,
        sealed,
    )
    outcome = run(place())
    rows = contents(place(), NEW)
    assert outcome.phase == "live" and len(rows) == 48 + 400 - 1 and outcome.deleted == 1
    assert rows[point_id(last.id)] == (last.id, "another text", {"n": -1})
    assert point_id(records()[1].id) not in rows


def test_a_write_that_lands_after_the_last_pass_is_taken_along(place: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = filled(place)
    raw = writer.sibling("docs")
    raw.prepare(OLD.spec)
    deleted = records()[0]
    noted = CollectionReader.note_succession

    def late(self: Any, succession: Any) -> None:
        noted(self, succession)
        if succession is not None and succession.phase == "live":
            fill_on(raw, OLD, [Record("late", "a late text"), Record("newer", "by the old model")])
            fill(place(), NEW, [Record("newer", "by the new model")], (64,))
            place().delete([deleted.id])

    monkeypatch.setattr(CollectionReader, "note_succession", late)
    run(place())
    monkeypatch.setattr(CollectionReader, "note_succession", noted)
    rows = contents(place(), NEW)
    assert rows[point_id("late")][1] == "a late text" and rows[point_id("newer")][1] == "by the new model"
    assert point_id(deleted.id) not in rows and len(rows) == 49
    raw.close()


def test_passes_go_on_behind_the_seal_until_one_changes_nothing(place: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = filled(place).sibling("docs")
    raw.prepare(OLD.spec)
    first, second = records()[:2]
    late = [Record(each.id, f"{each.text}, in flight when writers were held back") for each in (first, second)]
    once = RowCopy.run
    sealed: list[Pass] = []

    def slow(self: RowCopy) -> Pass:
        found = raw.succession()
        if found is None or found.phase != "sealed":
            return once(self)
        if not sealed:
            fill_on(raw, OLD, late[:1])
        sealed.append(once(self))
        if len(sealed) == 1:
            fill_on(raw, OLD, late[1:])  # lands behind the place where the pass has been
        return sealed[-1]

    monkeypatch.setattr(RowCopy, "run", slow)
    run(place())
    assert [done.changed for done in sealed] == [1, 1, 0]
    rows = contents(place(), NEW)
    assert [rows[point_id(each.id)][1] for each in late] == [each.text for each in late]
    raw.close()


def test_an_alias_is_a_name_like_any_other(place: Places) -> None:
    before = contents(filled(place), OLD)
    place().swap_alias("live")
    outcome = run(place("live"))
    assert outcome.collection == "live" and contents(place("live"), NEW) == before
    assert contents(place(), NEW) == before  # the collection itself, whose metadata it is
    assert Migration(place("live")).rollback(OLD).phase == "rolled back"  # type: ignore[arg-type]
    assert contents(place("live"), OLD) == before


def test_a_run_that_is_killed_goes_on_and_a_dead_seal_ends(place: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = filled(place)

    class Killed(BaseException):
        pass

    def kill(self: Any, succession: Any) -> None:
        noted(self, succession)
        if succession is not None and succession.phase == phase:
            raise Killed

    noted = CollectionReader.note_succession
    for phase, rows in (("filling", 0), ("sealed", 48)):
        with monkeypatch.context() as patch:
            patch.setattr(CollectionReader, "note_succession", kill)
            with pytest.raises(Killed):
                run(place())
        found = status(place())
        assert (found.phase, found.other_rows, found.rows, found.share) == (phase, rows, 48, rows / 48)
        assert len(place().search(OLD, QUESTION)) == 10
    assert place().succession().wait > 10
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 60)
    fill_on(writer, OLD, [Record("late", "a late text")])  # nobody waits for a dead command
    outcome = run(place())
    assert (outcome.phase, outcome.written) == ("live", 1) and len(contents(place(), NEW)) == 49
    again = run(place())
    assert (again.phase, again.written, again.passes) == ("live", 0, 0)


def test_going_back_takes_along_what_was_written_since(place: Places) -> None:
    filled(place)
    run(place())
    ingest([Record("late", "a late text")], engine=NEW, sink=place(), show_progress=False)  # type: ignore[arg-type]
    place().delete([records()[0].id])
    with pytest.raises(FingerprintMismatchError):
        Migration(place()).rollback(NEW)  # type: ignore[arg-type]
    outcome = Migration(place()).rollback(OLD)  # type: ignore[arg-type]
    assert (outcome.phase, outcome.serving, outcome.rows) == ("rolled back", "docs", 48)
    rows = contents(place(), OLD)
    assert point_id("late") in rows and point_id(records()[0].id) not in rows
    fill_on(filled(place, []), OLD, [Record("later", "a later text")])
    assert run(place()).written == 1  # the new collection was kept
    assert len(contents(place(), NEW)) == 49


def test_giving_up_before_the_cut_over_and_dropping_what_was_filled(place: Places) -> None:
    filled(place)
    stopped = CopyOptions()
    stopped.stop.set()
    outcome = run(place(), options=stopped)
    assert outcome.stopped and outcome.phase == "filling"
    with pytest.raises(InvalidRequestError, match="has not cut over"):
        Migration(place()).finish()
    with pytest.raises(InvalidRequestError, match="is being migrated to 'docs__.*', by another model"):
        run(place(), WordModel("third"))
    assert Migration(place()).rollback(None).phase == "rolled back"
    assert Migration(place()).finish().phase is None
    assert place().collections() == ["docs"] and place().succession() is None
    assert contents(place(), OLD)
    with pytest.raises(InvalidRequestError, match="nothing to finish"):
        Migration(place()).finish()
    with pytest.raises(InvalidRequestError, match="no former collection"):
        Migration(place()).rollback(OLD)  # type: ignore[arg-type]


def test_finish_waits_for_readers(place: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED", 120.0)
    filled(place)
    run(place())
    with pytest.raises(InvalidRequestError, match=r"may still search the old collection; finish in 1[12]\d s"):
        Migration(place()).finish()


def test_a_record_that_fails_holds_the_cut_over_back(place: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(place)
    refused = QdrantDriver.check

    def check(self: Any, record: Record, widths: Any) -> None:
        refused(self, record, widths)
        if record.id == records()[3].id:
            raise InvalidRequestError("it is too large")

    with monkeypatch.context() as patch:
        patch.setattr(QdrantDriver, "check", check)
        outcome = run(place())
    assert (outcome.failed, outcome.phase, outcome.serving) == (1, "filling", "docs")
    assert len(place().search(OLD, QUESTION)) == 10
    assert run(place()).phase == "live"


def test_vectors_that_are_not_the_engines_are_not_cut_over(place: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(place)
    wrong = WordModel("new", dimensions=64)
    monkeypatch.setattr(wrong, "submit", lambda task, texts, params: NEW.submit(task, ["x"] * len(texts), params))
    with pytest.raises(SinkError, match=r"48 of 48 vectors .* are not those of new; nothing was cut over"):
        run(place(), wrong)
    assert status(place()).serving == "docs"


def test_the_widths_alone_can_change(place: Places) -> None:
    filled(place)
    with pytest.raises(InvalidRequestError, match="there is nothing to migrate"):
        run(place(), OLD)
    outcome = run(place(), OLD, dimensions=[64, 384])
    assert outcome.phase == "live" and place().open().dimensions == (64, 384)
    contents(place(), OLD)
    assert len(place(dimensions=[384]).search(OLD, QUESTION)) == 10
    assert len(place(dimensions=[384]).search(OLD, QUESTION)) == 10


class Halves:
    """Cuts a text in two."""

    settings = "halves"

    def split(self, record: Record) -> list[Record]:
        middle = len(record.text) // 2
        parts = [(0, record.text[:middle]), (middle, record.text[middle:])]
        return [
            Record(
                record.id,
                text,
                {**record.metadata, "chunk": n, "chunk_start": at, "chunk_end": at + len(text)},
                chunk=n,
            )
            for n, (at, text) in enumerate(parts)
        ]


def test_chunks_stay_as_they_are(place: Places) -> None:
    ingest(records(8), engine=OLD, sink=place(), chunking=Halves(), show_progress=False)  # type: ignore[arg-type]
    before = contents(place(), OLD)
    assert len(before) == 16
    run(place())
    assert contents(place(), NEW) == before and place().open().chunked
    place().delete([records()[0].id])
    assert place().count() == 14  # with both of its pieces


def test_chunks_are_not_cut_anew_without_the_source(place: Places) -> None:
    from millpond.ingest import Chunking

    ingest(records(8), engine=OLD, sink=place(), chunking=Halves(), show_progress=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="chunks, which cannot be joined"):
        run(place(), chunking=Chunking(max_tokens=2))


def test_records_come_from_the_source_and_what_it_lacks_from_the_collection(place: Places) -> None:
    ingest(records(8), engine=OLD, sink=place(), chunking=Halves(), show_progress=False)  # type: ignore[arg-type]
    outcome = run(place(), records=lambda: iter(records(6)))
    rows = contents(place(), NEW)
    assert outcome.phase == "live" and len(rows) == 6 + 2 * 2
    assert rows[point_id(records()[0].id)][1] == records()[0].text
    with pytest.raises(InvalidRequestError, match="chunks of the new collection are not those of the old"):
        Migration(place()).rollback(OLD)  # type: ignore[arg-type]
    assert Migration(place()).rollback(None).serving == "docs"


def test_the_rate_is_held(place: Places) -> None:
    filled(place)
    start = time.monotonic()
    outcome = run(place(), options=CopyOptions(rows_per_second=60))
    assert outcome.phase == "live" and time.monotonic() - start >= 47 / 60


def test_a_plan_says_what_it_costs_and_writes_nothing(place: Places) -> None:
    filled(place)
    found = plan(Migration(place(), Change(spec=NEW.spec)), NEW)  # type: ignore[arg-type]
    assert (found.rows, found.done, found.vector_bytes, found.new_vector_bytes) == (48, 0, 48 * 384 * 4, 48 * 64 * 4)
    assert found.rows_per_second is not None and found.seconds == pytest.approx(48 / found.rows_per_second)
    assert place().collections() == ["docs"] and place().succession() is None
    run(place())
    with pytest.raises(InvalidRequestError, match="is still there; drop it by millpond migrate finish"):
        plan(Migration(place(), Change(spec=OLD.spec)))
    with pytest.raises(InvalidRequestError, match="belongs to the migration of 'docs'"):
        plan(Migration(place(place().succession().serving), Change(spec=WordModel("third").spec)))


def test_another_place(place: Places, tmp_path: Path) -> None:
    before = contents(filled(place), OLD)
    url = f"qdrant+path:{tmp_path}/elsewhere#other"
    assert run(place(), to=url).serving == url
    assert contents(place(), NEW) == before
    assert len(place().search(NEW, QUESTION)) == 10
    Migration(place()).finish()
    assert contents(place(), NEW) == before and place().collections() == ["docs"]


def test_a_succession_of_a_later_version_is_refused(place: Places) -> None:
    head = filled(place)
    run(place())
    good = place().succession().to_dict()
    assert Succession.from_dict(good) == place().succession()
    for bad in ({**good, "later": 1}, {**good, "phase": "sunk"}):
        with pytest.raises(ValueError, match="succession"):
            Succession.from_dict(bad)
    assert Succession(serving="a", phase="sealed", until=time.time() + 5).wait > 4
    assert replace(head.succession(), phase="sealed", until=1.0).wait == 0


def test_eight_threads_search_through_the_cut_over(place: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectionDriver, "trusted", 0.01)
    shared = filled(place)
    done, answers = threading.Event(), [0, 0]
    failures: list[tuple[str, int]] = []

    def search(number: int) -> None:
        sink, engine = (shared if number % 2 else place()), (OLD, NEW)[number % 4 == 3]
        while not done.is_set():
            try:
                assert len(sink.search(engine, QUESTION, k=5)) == 5
            except FingerprintMismatchError:
                if engine is NEW and not live.is_set():  # before the cut-over it has no vectors to search
                    continue
                failures.append(("mismatch", number))
            except Exception as error:
                failures.append((repr(error), number))
            else:
                answers[engine is NEW] += 1

    live = threading.Event()
    threads = [threading.Thread(target=search, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    run(place(), options=CopyOptions(rows_per_second=200, retry=RetryPolicy(give_up_after=1)))
    time.sleep(0.1)
    live.set()
    time.sleep(0.3)
    done.set()
    for thread in threads:
        thread.join()
    assert failures == [] and min(answers) > 10


def wide(count: int = 400) -> list[Record]:
    generator = np.random.default_rng(3)
    words = [f"word{number}" for number in range(120)]
    return [
        Record(f"r{number}", " ".join(generator.choice(words, 14)), {"n": number, "even": number % 2 == 0})
        for number in range(count)
    ]


def test_a_bridge_finds_old_vectors_by_new_questions(place: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(place, wide())
    turned = Turned(OLD)
    monkeypatch.setattr(CollectionDriver, "trusted", 0.0)
    expected = [hit.id for hit in place().search(OLD, wide()[5].text, k=10)]
    options = CopyOptions()
    passed = RowCopy.run

    def stop_first(copy: RowCopy) -> Any:
        options.stop.set()
        return passed(copy)

    monkeypatch.setattr(RowCopy, "run", stop_first)
    monkeypatch.setattr("millpond.migrate.bridge._FITTED_ROWS", 250)
    outcome = run(place(), turned, bridge=True, options=options)
    assert outcome.stopped and outcome.recall is not None and outcome.recall > 0.95
    reader = place()
    assert reader.open().model == "old"
    hits = reader.search(turned, wide()[5].text, k=10)
    assert [hit.id for hit in hits] == expected
    assert [hit.score for hit in hits] == pytest.approx(
        [hit.score for hit in reader.search(OLD, wide()[5].text, k=10)], abs=0.02
    )
    even = reader.search(turned, wide()[5].text, k=10, filter={"even": True})
    assert len(even) == 10 and all(hit.metadata["even"] for hit in even)
    monkeypatch.setattr(RowCopy, "run", passed)
    assert run(place(), turned).phase == "live"
    Migration(place()).finish()
    assert [hit.id for hit in place().search(OLD, wide()[5].text, k=10)] == expected  # by the bridge back
    assert [hit.id for hit in place().search(turned, wide()[5].text, k=10)] == expected


def test_models_that_differ_too_much_get_no_bridge(place: Places) -> None:
    filled(place, wide())
    other = Scattered("scattered")
    with pytest.raises(InvalidRequestError, match=r"questions would find 0\.\d\d of .* run without --bridge"):
        run(place(), other, bridge=True)
    with pytest.raises(FingerprintMismatchError, match="built by old"):
        place().search(other, QUESTION)
    assert run(place(), other).phase == "live"
