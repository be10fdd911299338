"""A collection that was restored from a copy, or changed by others, is noticed, compared and written again."""

import copy
from dataclasses import replace

import pytest
from tests.ingest.crashes import Countdown, Crash, CrashingSink, Words, crash_at, memory, run, small, some

from millpond.ingest import Record, point_id
from millpond.ingest.pipeline import verify as verify_module


def rows(client):
    return client["docs"][1]


def restore(client, saved):
    client.clear()
    client.update(copy.deepcopy(dict(saved)))


@pytest.mark.parametrize("chunker", [None, Words(1)], ids=["whole", "chunked"])
@pytest.mark.parametrize("what", ["text", "metadata", "chunks"])
def test_a_restored_copy_is_compared_and_what_is_old_is_written_again(engine, tmp_path, caplog, what, chunker):
    client, options = memory(), {"journal": tmp_path / "j", "chunker": chunker}
    source = some(60)
    changed = {
        "text": [Record(each.id, f"new {each.text}", each.metadata) for each in source[:10]],
        "metadata": [Record(each.id, each.text, {"n": -1}) for each in source[:10]],
        "chunks": [Record(each.id, "text", each.metadata) for each in source[:10]],
    }[what]
    run(source, engine, CrashingSink(client), **options)
    saved = copy.deepcopy(dict(client))
    run([*changed, *source[10:]], engine, CrashingSink(client), **options)
    wanted = {row_id: record for row_id, (record, _) in rows(client).items()}
    restore(client, saved)
    caplog.clear()
    report = run([*changed, *source[10:]], engine, CrashingSink(client), **options)
    assert report.unchanged == 50 and "it was restored from a copy" in caplog.text
    assert {row_id: record for row_id, (record, _) in rows(client).items()} == wanted
    caplog.clear()
    assert run([*changed, *source[10:]], engine, CrashingSink(client), **options).unchanged == 60
    assert not caplog.records


def test_rows_of_a_copy_that_the_journal_does_not_know_stay_and_blank_ones_go(engine, tmp_path):
    client, options = memory(), {"journal": tmp_path / "j"}
    run(some(9), engine, CrashingSink(client), **options)
    saved = copy.deepcopy(dict(client))
    source = [Record("r1", " "), *some(8)[2:]]
    run(source, engine, CrashingSink(client), sync=True, **options)
    restore(client, saved)
    report = run(source, engine, CrashingSink(client), verify=True, **options)
    assert (report.deleted, report.unchanged) == (1, 6)
    assert {key for key, _ in CrashingSink(client).stored} == {"r0", *(f"r{n}" for n in range(2, 9))}
    assert (report.verification.rows, report.verification.expected) == (8, 6)


def test_a_run_with_another_journal_or_none_is_noticed_once(engine, tmp_path):
    client = memory()
    run(some(9), engine, CrashingSink(client), journal=tmp_path / "one")
    run(some(3, "other"), engine, CrashingSink(client))
    assert run(some(9), engine, CrashingSink(client), journal=tmp_path / "one").written == 3
    sink = CrashingSink(client)
    sink.reads = Countdown(0)  # no row is looked at
    assert run(some(9), engine, sink, journal=tmp_path / "one").unchanged == 9


@pytest.mark.parametrize("journals", ["jj", "jk"])
@pytest.mark.parametrize("late", [0, 5], ids=["from the start", "in the middle"])
def test_of_two_runs_at_once_neither_trusts_its_entries(engine, tmp_path, journals, late):
    client, (first, second) = memory(), (tmp_path / name for name in journals)
    run(some(9), engine, CrashingSink(client), journal=first)

    def source():
        for number, record in enumerate(some(9, "one")):
            if number == late:
                run(some(4, "two"), engine, CrashingSink(client), journal=second)
            yield record

    with small(1, page=1):
        run(source(), engine, CrashingSink(client), journal=first)
    for journal, text in [(first, "one"), (second, "two"), (first, "one")]:
        run(some(9, text), engine, CrashingSink(client), journal=journal)
        assert CrashingSink(client).stored == {(each.id, 0): each.text for each in some(9, text)}


def test_a_copy_that_was_made_while_a_run_wrote_is_noticed(engine, tmp_path):
    client, saved = memory(), {}
    run(some(9), engine, CrashingSink(client), journal=tmp_path / "j")

    def source():
        yield from some(3, "new")
        while not saved:
            if any(record.text == "new 2" for record, _ in rows(client).values()):
                saved.update(copy.deepcopy(dict(client)))
            yield Record("more", "text")
        yield from some(9, "new")[3:]

    with small(1, page=1):
        run(source(), engine, CrashingSink(client), journal=tmp_path / "j")
    restore(client, saved)
    run(some(9, "new"), engine, CrashingSink(client), journal=tmp_path / "j")
    assert {text for (key, _), text in CrashingSink(client).stored.items() if key != "more"} == {
        f"new {n}" for n in range(9)
    }


@pytest.mark.parametrize("method", ["note_run", "distrust", "add", "write"])
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_leads_to_a_comparison_or_to_no_difference(engine, tmp_path, method, after):
    client, options = memory(), {"journal": tmp_path / "j"}
    run(some(9, "old"), engine, CrashingSink(client), **options)
    saved = copy.deepcopy(dict(client))
    run(some(9), engine, CrashingSink(client), **options)
    restore(client, saved)
    for calls in range(3):
        sink = CrashingSink(client)
        try:
            with small(2, 2):
                if method == "write":
                    sink.upserts = Countdown(calls, after=after)
                    run(some(9), engine, sink, **options)
                else:
                    with crash_at(method, calls, after=after):
                        run(some(9), engine, sink, **options)
        except Crash:
            pass
    run(some(9), engine, CrashingSink(client), **options)
    assert CrashingSink(client).stored == {(each.id, 0): each.text for each in some(9)}


def test_a_killed_run_goes_on_without_a_comparison(engine, tmp_path):
    client, options = memory(), {"journal": tmp_path / "j"}
    sink = CrashingSink(client)
    sink.upserts = Countdown(3)
    with pytest.raises(Crash), small(2, 2):
        run(some(9), engine, sink, **options)
    sink = CrashingSink(client)
    sink.reads = Countdown(0)
    assert run(some(9), engine, sink, **options).unchanged == 6


def test_an_old_journal_and_collection_are_compared_once(engine, tmp_path):
    client, options = memory(), {"journal": tmp_path / "j"}
    run(some(9), engine, CrashingSink(client), **options)
    manifest, stored = client["docs"]
    client["docs"] = ({key: value for key, value in manifest.items() if key != "run"}, stored)
    sink = CrashingSink(client)
    assert run(some(9), engine, sink, **options).unchanged == 9 and sink.last_run()
    sink.reads = Countdown(0)
    assert run(some(9), engine, sink, **options).unchanged == 9


@pytest.mark.parametrize("scanned", [100_000, 0], ids=["all ids", "some ids"])
def test_rows_that_were_deleted_by_hand_while_others_were_added_are_written_again(
    engine, tmp_path, monkeypatch, scanned
):
    monkeypatch.setattr(verify_module, "_SCANNED_ROWS", scanned)
    client, options = memory(), {"journal": tmp_path / "j"}
    run(some(900), engine, CrashingSink(client), **options)
    for number in range(400, 410):  # neither the first ids nor the last ones
        record, vectors = rows(client).pop(point_id(f"r{number}"))
        rows(client)[point_id(f"x{number}")] = (replace(record, id=f"x{number}"), vectors)
    assert run(some(900), engine, CrashingSink(client), **options).written == 10
    assert len(rows(client)) == 910
