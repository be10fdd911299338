"""copy over a database in memory: what is written, left out, refused, counted and deleted, and how a copy goes on."""

import json
import threading

import numpy as np
import pytest
from tests.ingest.crashes import Countdown, Crash, CrashingSink, memory
from tests.ingest.memory_sink import MemoryDriver, MemorySink

from millpond.errors import (
    FingerprintMismatchError,
    InvalidRequestError,
    SinkError,
    SinkRejectedError,
    SinkUnavailableError,
)
from millpond.ingest import Record, RetryPolicy, WriteBatch, content_hash, copy, point_id, read
from millpond.ingest.copying import copy_run
from millpond.testing import WordEngine
from millpond.testing.sink import fill, records, vectors

WIDTHS = (64, 384)


@pytest.fixture(scope="module")
def words():
    return WordEngine()


@pytest.fixture
def source(words):
    """A collection of 48 records."""
    sink = CrashingSink(memory(), dimensions=WIDTHS)
    fill(sink, words, records(), WIDTHS)
    return sink


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pages of ten rows."""
    monkeypatch.setattr(copy_run, "_PAGE_ROWS", 10)


def rows(sink):
    """``{row id: (record, {width: vector})}``."""
    return {row_id: (record, {w: v.tolist() for w, v in kept.items()}) for row_id, (record, kept) in sink._rows.items()}


def quiet(source, target, **options):
    return copy(source, target, show_progress=False, **options)


def test_the_rows_of_the_target_are_those_of_the_source(source, words):
    target = CrashingSink(memory())
    report = quiet(source, target)
    assert rows(target) == rows(source) and report.good
    assert (report.read, report.written, report.unchanged, report.failed) == (48, 48, 0, 0)
    found = report.verification
    assert (found.rows, found.expected, found.compared, found.different) == (48, 48, 48, 0)
    for name in ("fingerprint", "model", "settings", "dimensions", "fields", "chunked", "folder", "sparse"):
        assert getattr(target.manifest, name) == getattr(source.manifest, name)
    for question in ("how to mend zip archives", "a song"):
        assert target.search(words, question) == source.search(words, question)


def test_what_the_target_holds_is_left_out_and_what_changed_is_written(source, words):
    target = CrashingSink(memory())
    quiet(source, target)
    target.written.clear()
    again = quiet(source, target)
    assert (again.read, again.written, again.unchanged) == (48, 0, 48) and not target.written and again.good
    new = [Record("measuring/sockets", "another text", {}), Record("measuring/violins", "measuring violins", {"n": -1})]
    fill(source, words, new, WIDTHS)
    third = quiet(source, target)
    assert sorted(target.written) == sorted(each.id for each in new) and third.unchanged == 46
    assert rows(target) == rows(source)


def test_another_vector_of_the_same_text_is_written(source, words):
    target = CrashingSink(memory())
    quiet(source, target)
    row_id = point_id("measuring/sockets")
    target._rows[row_id][1][64] = -target._rows[row_id][1][64]
    assert quiet(source, target).written == 1 and rows(target) == rows(source)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("write", range(5))
def test_a_copy_that_is_killed_goes_on_and_loses_and_doubles_nothing(source, write, after):
    client = memory()
    target = CrashingSink(client)
    target.upserts = Countdown(write, after=after)
    with pytest.raises(Crash):
        quiet(source, target)
    assert len(target._rows) == min(10 * (write + after), 48)
    held = len(target._rows)
    again = CrashingSink(client)
    report = quiet(source, again)
    assert (report.unchanged, report.written) == (held, 48 - held) and rows(again) == rows(source) and report.good


def test_a_stopped_copy_says_so_and_the_next_one_goes_on(source):
    client, stop = memory(), threading.Event()
    target = CrashingSink(client)
    target.upserts = lambda call, *given: (stop.set(), call(*given))
    report = quiet(source, target, stop=stop)
    assert report.stopped and report.read == report.written == 10 and not report.good and report.verification is None
    assert quiet(source, CrashingSink(client)).unchanged == 10


def test_a_database_that_does_not_answer_is_waited_for(source, monkeypatch):
    target = CrashingSink(memory())
    target.upserts = Countdown(2, error=SinkUnavailableError("busy"))
    source.reads = Countdown(1, error=SinkUnavailableError("busy, too"))
    report = quiet(source, target, retry=RetryPolicy(first_wait=0.001))
    assert report.retried == 2 and rows(target) == rows(source)


def test_the_ids_are_listed_again_where_the_source_did_not_answer(source, monkeypatch):
    scan, failures = source._driver.scan, [SinkUnavailableError("away"), SinkUnavailableError("away, too")]

    def failing(manifest):
        (page,) = scan(manifest)
        yield page[:30] * 2  # some twice
        if failures:
            raise failures.pop()
        yield page[30:]

    source._driver.scan = failing
    target = CrashingSink(memory())
    report = quiet(source, target, retry=RetryPolicy(first_wait=0.001))
    assert (report.read, report.retried) == (48, 2) and rows(target) == rows(source)


def test_some_widths_are_copied_and_none_is_computed(source, words):
    target = CrashingSink(memory(), dimensions=[64])
    quiet(source, target)
    assert target.manifest.dimensions == (64,)
    assert {row_id: kept for row_id, (_, kept) in rows(target).items()} == {
        row_id: {64: kept[64]} for row_id, (_, kept) in rows(source).items()
    }
    narrow = CrashingSink(target.client)  # takes the widths that the collection has
    assert quiet(source, narrow).unchanged == 48
    for sink in (CrashingSink(memory(), dimensions=[32]), CrashingSink(memory(), dimensions=[32, 384])):
        with pytest.raises(InvalidRequestError, match=r"holds the widths \[64, 384\], not \[32\].*computes no vectors"):
            quiet(source, sink)
        assert not sink.client
    with pytest.raises(InvalidRequestError, match=r"not \[384\]"):
        quiet(target, source)


def test_a_target_of_another_form_is_refused_before_anything_is_read(source, words):
    source.reads = Countdown(0)  # whatever is read is a crash
    other = MemorySink(memory(), "docs", dimensions=WIDTHS)
    fill(other, WordEngine("other words"), records(3), WIDTHS)
    with pytest.raises(FingerprintMismatchError, match="are by other words .*the copied ones by words"):
        quiet(source, other)
    chunked = MemorySink(memory(), "docs", dimensions=WIDTHS)
    chunked.prepare(words.spec, chunked=True)
    with pytest.raises(InvalidRequestError, match="holds chunks of records, and the source whole records"):
        quiet(source, chunked)
    filled = MemorySink(memory(), "docs", dimensions=WIDTHS, fields="langchain")
    filled.prepare(words.spec)
    plain = MemorySink(filled.client, "docs", fields="plain")
    with pytest.raises(InvalidRequestError, match="pass fields='langchain'"):
        quiet(source, plain)
    assert len(other._driver.rows) == 3 and not filled._driver.rows and not chunked._driver.rows


def test_a_layout_that_the_database_lacks_is_refused(source, monkeypatch):
    class Plain(MemoryDriver):
        layouts = ("plain",)

    client = memory()
    lang = MemorySink(client, "lang", fields="langchain", dimensions=WIDTHS)
    quiet(source, lang)
    assert lang.manifest.fields == "langchain"
    target = MemorySink(memory(), "docs")
    target._driver.__class__ = Plain
    with pytest.raises(InvalidRequestError, match="layout 'langchain', and Memory stores plain; pass fields='plain'"):
        quiet(lang, target)
    target = MemorySink(memory(), "docs", fields="plain")
    target._driver.__class__ = Plain
    assert quiet(lang, target).written == 48


def test_collections_that_millpond_did_not_make_or_that_do_not_exist_are_refused(source):
    foreign = CrashingSink(memory())
    foreign.client["docs"] = (None, {})
    with pytest.raises(FingerprintMismatchError, match=r"not made by millpond.*millpond ingest"):
        quiet(foreign, CrashingSink(memory()))
    with pytest.raises(InvalidRequestError, match="no collection 'docs'"):
        quiet(CrashingSink(memory()), CrashingSink(memory()))
    with pytest.raises(InvalidRequestError, match="the same collection"):
        quiet(source, source)
    with pytest.raises(TypeError, match="target is of type str"):
        quiet(source, "qdrant+path:x#docs")
    for options, message in (
        ({"rows_per_second": 0}, "rows_per_second=0"),
        ({"rows_per_second": True}, "rows_per_second=True"),
        ({"sync_max": 2}, "sync_max=2"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            quiet(source, CrashingSink(memory()), **options)


def test_a_row_that_the_target_does_not_take_is_named_and_kept(source, words, tmp_path, caplog):
    fill(source, words, [Record("bad", "a bad text", {"k": 1})], WIDTHS)

    class Refusing(CrashingSink):
        def _upsert(self, batch):
            if any(record.id == "measuring/sockets" for record in batch.records):
                raise SinkRejectedError("no sockets")
            super()._upsert(batch)

        def check(self, record):
            if "bad" in record.text:
                raise InvalidRequestError("no bad texts")

    target, letters = Refusing(memory()), tmp_path / "dead.jsonl"
    report = quiet(source, target, dead_letters=letters)
    assert (report.read, report.written, report.failed) == (49, 47, 2) and not report.good
    assert sorted(report.failed_ids) == ["bad", "measuring/sockets"]
    assert "left out record 'bad': no bad texts" in caplog.text and "no sockets" in caplog.text
    kept = {record.id: record for record in read(letters)}
    assert kept["bad"] == Record("bad", "a bad text", {"k": 1})
    assert len(target._rows) == 47 and report.verification.good


def test_rows_without_a_whole_record_or_vector_are_left_out(source, caplog):
    driver = source._driver
    stale, bare, zero = point_id("measuring/sockets"), point_id("measuring/violins"), point_id("measuring/glaciers")
    read_rows = driver.read

    def damaged(row_ids, widths, manifest):
        from dataclasses import replace

        found = read_rows(row_ids, widths, manifest)
        for row_id, change in (
            (stale, {"text": "edited by hand"}),
            (bare, {"vectors": {384: np.ones(384, np.float32)}}),
            (zero, {"vectors": {64: np.zeros(64, np.float32), 384: np.ones(384, np.float32)}}),
        ):
            if row_id in found:
                found[row_id] = replace(found[row_id], **change)
        return found

    driver.read = damaged
    target = CrashingSink(memory())
    report = quiet(source, target)
    assert report.failed == 3 and not target._rows.keys() & {stale, bare, zero} and len(target._rows) == 45
    for words in ("not the one that its vectors were made of", r"no vector of the widths [64]", "zero or not finite"):
        assert words in caplog.text


def test_only_vectors_of_another_length_are_changed(source):
    row_id, other = point_id("measuring/sockets"), point_id("measuring/violins")
    source._rows[row_id][1][64] = source._rows[row_id][1][64] * 3
    half = source._rows[other][1][64].astype(np.float16).astype(np.float32)
    source._rows[other][1][64] = half
    target = CrashingSink(memory())
    quiet(source, target)
    np.testing.assert_allclose(target._rows[row_id][1][64], source._rows[row_id][1][64] / 3, atol=1e-6)
    assert target._rows[other][1][64].tolist() == half.tolist()


def test_rows_that_are_deleted_meanwhile_are_left_out(source):
    read_rows, gone = source._driver.read, [point_id(record.id) for record in records()[30:32]]

    def deleting(row_ids, widths, manifest):
        for row_id in gone:
            source._driver.rows.pop(row_id, None)
        return read_rows(row_ids, widths, manifest)

    source._driver.read = deleting
    target = CrashingSink(memory())
    report = quiet(source, target)
    assert report.read == 46 and report.good and not target._rows.keys() & set(gone)


class TestSync:
    @pytest.fixture
    def target(self, source, words):
        """A copy, with four rows more."""
        target = CrashingSink(memory())
        quiet(source, target)
        fill(target, words, [Record(f"old {n}", f"old text {n}") for n in range(4)], WIDTHS)
        return target

    def test_rows_that_the_source_does_not_have_stay_without_it(self, source, target):
        report = quiet(source, target)
        assert report.deleted == 0 and len(target._rows) == 52 and report.good

    def test_rows_that_the_source_does_not_have_are_deleted(self, source, target):
        report = quiet(source, target, sync=True)
        assert report.deleted == 4 and rows(target) == rows(source) and report.good

    def test_too_many_rows_stay(self, source, target):
        with pytest.raises(SinkError, match="would delete 4 of the 52 rows .*sync_max=0.05 allows 2; nothing"):
            quiet(source, target, sync=True, sync_max=0.05)
        assert len(target._rows) == 52

    def test_an_empty_source_deletes_nothing(self, source, target):
        source.delete_rows(list(source._rows))
        with pytest.raises(SinkError, match="though the source has no row that was copied; nothing was deleted"):
            quiet(source, target, sync=True, sync_max=1)
        assert len(target._rows) == 52

    def test_chunks_beyond_those_of_the_source_are_deleted(self, words):
        pieces = [
            Record("long", f"piece {n}", {"chunk": n, "chunk_start": 9 * n, "chunk_end": 9 * n + 7}, n)
            for n in range(4)
        ]
        client = memory()
        source = MemorySink(client, "a", dimensions=[384])
        source.prepare(words.spec, chunked=True)
        batch = WriteBatch(
            records=pieces,
            ids=[point_id(each.id, each.chunk) for each in pieces],
            vectors={384: vectors(words, [each.text for each in pieces], 384)},
        )
        source.write(batch)
        target = MemorySink(client, "b")
        assert quiet(source, target).written == 4 and target.manifest.chunked
        assert sorted(record.chunk for record, _ in target._driver.rows.values()) == [0, 1, 2, 3]
        source.delete_rows([point_id("long", 3)])
        assert quiet(source, target, sync=True).deleted == 1
        assert set(target._driver.rows) == {point_id("long", n) for n in range(3)}
        target.delete(["long"])
        assert target.count() == 0


class TestFrameworksOwnRows:
    @pytest.fixture
    def own(self, words):
        """A collection with a row of millpond's and two with ids of a framework's."""
        sink = MemorySink(memory(), "docs", dimensions=[384])
        fill(sink, words, [Record("a", "the weir")], [384])
        texts = ["the pond", "the sluice"]
        ids = ["b", "f3b0a7c0-0c5e-4c5f-8d4e-6a5f0a6f7b11"]
        sink._driver.rows.update(
            {
                row_id: (Record(row_id, text), {384: vectors(words, [text], 384)[0]})
                for row_id, text in zip(ids, texts, strict=True)
            }
        )
        return sink

    def test_they_get_the_id_by_which_the_target_finds_them(self, own):
        target = MemorySink(memory(), "docs")
        assert quiet(own, target).good
        assert set(target._driver.rows) == {
            point_id(each) for each in ("a", "b", "f3b0a7c0-0c5e-4c5f-8d4e-6a5f0a6f7b11")
        }
        assert quiet(own, target, sync=True).unchanged == 3
        target.delete(["b"])
        assert target.count() == 2

    def test_they_keep_theirs_where_the_target_finds_that(self, own, monkeypatch):
        monkeypatch.setattr(MemoryDriver, "row_ids", lambda self, record_id, manifest: [point_id(record_id), record_id])
        target = MemorySink(memory(), "docs")
        assert quiet(own, target).good and set(target._driver.rows) == set(own._driver.rows)

    def test_of_two_rows_for_one_id_none_is_lost_silently(self, own, words):
        fill(own, words, [Record("b", "another text")], [384])
        target = MemorySink(memory(), "docs")
        report = quiet(own, target)
        assert (report.read, report.written, report.failed, report.failed_ids) == (4, 3, 1, ("b",))
        assert target._driver.rows[point_id("b")][0].text == "another text"


def test_the_rate_is_kept(source, monkeypatch):
    waited, now = [], [0.0]

    class Stop(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)
            now[0] += timeout
            return False

    monkeypatch.setattr(copy_run.time, "perf_counter", lambda: now[0])
    report = quiet(source, CrashingSink(memory()), rows_per_second=4, stop=Stop())
    assert report.written == 48 and sum(waited) == pytest.approx(12) and len(waited) == 12


def test_a_journal_notices_that_a_copy_changed_the_collection(source):
    target = CrashingSink(memory())
    quiet(source, target)
    before = target.last_run()
    assert before
    quiet(source, target)  # nothing is written
    assert target.last_run() == before
    target.delete_rows([point_id("measuring/sockets")])
    quiet(source, target)
    assert target.last_run() != before


def test_the_dead_letter_of_a_row_without_a_record_has_its_id(source, tmp_path):
    read_rows = source._driver.read

    def unreadable(row_ids, widths, manifest):
        from dataclasses import replace

        found = read_rows(row_ids, widths, manifest)
        return {row_id: replace(row, record_id="x\0y") for row_id, row in found.items()}

    source._driver.read = unreadable
    report = quiet(source, CrashingSink(memory()), dead_letters=tmp_path / "dead.jsonl")
    assert report.failed == 48
    letters = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert {letter["id"] for letter in letters} == set(source._rows)
    assert content_hash("") not in {letter["text"] for letter in letters}
