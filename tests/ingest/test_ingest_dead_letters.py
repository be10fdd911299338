"""Dead letters: a source that gives back what failed, and a file that is appended once and mended after a kill."""

import json
import os
import resource
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.ingest.crashes import CrashingSink, Refusing, memory, run, small

from millpond.errors import InvalidRequestError, JournalError
from millpond.ingest import Record, Rejected, read
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.sources.json_file import DEAD_LETTER_KEY, dump_record, dump_rejected


def letters(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return list(read(path))


def test_a_record_comes_back_as_it_was(tmp_path):
    records = [
        Record("a", "text é\n", {"n": [1, None], "reason": "its own", "where": "here"}),
        Record("a", "", {"chunk": 3, "chunk_start": 5, "chunk_end": 5}, chunk=3),
        Record("id", "text", {"millpond_dead_letter": "of its own", "id": 1, "text": 2, "metadata": {"x": 1}}),
    ]
    lines = [dump_record(record, where="x.jsonl:4", reason="no answer") for record in records]
    assert all(json.loads(line)["reason"] == "no answer" and "\n" not in line for line in lines)
    for name in ("dead.jsonl", "dead.ndjson"):
        assert letters(tmp_path / name, *lines) == records
    (tmp_path / "dead.json").write_text(f"[{','.join(lines)}]")
    assert list(read(tmp_path / "dead.json", id_column="_id", text_column="body")) == records


def test_a_repaired_line_is_read_with_the_names_of_the_source(tmp_path):
    rejected = Rejected(where="x.jsonl:2", reason="not JSON", content='{"_id": 7, "body": "now whole", "n": 1}')
    (tmp_path / "dead.jsonl").write_text(dump_rejected(rejected))
    assert list(read(tmp_path / "dead.jsonl", id_column="_id", text_column="body")) == [
        Record("7", "now whole", {"n": 1})
    ]


BROKEN = {
    "cut off": b'{"id": "x", "text": "cut',
    "a list": b'["x", "t"]',
    "not UTF-8": b'{"id": "x", "text": "caf\xe9"}',
    "a surrogate": b'{"id": "x", "text": "\\ud800"}',
    "no text": b'{"id": "x", "n": 1}',
    "a name like a letter": b'{"id": "x", "text": 5, "reason": "r", "where": "w"}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_line_that_holds_no_record_fails_again_with_its_place(tmp_path, name):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"id": "a", "text": "t"}\n' + BROKEN[name] + b"\n")
    _, first = read(path)
    assert isinstance(first, Rejected) and first.where == f"{path}:2"
    assert first.record_id == ("x" if name not in ("cut off", "a list", "not UTF-8") else None)
    (again,) = letters(tmp_path / "dead.jsonl", dump_rejected(first))
    assert (again.where, again.reason, again.content) == (first.where, first.reason, first.content)
    (third,) = letters(tmp_path / "dead2.jsonl", dump_rejected(again))
    assert third == again


@pytest.mark.parametrize(
    ("letter", "reason"),
    [
        ({DEAD_LETTER_KEY: 2, "id": "a", "text": "t"}, "millpond_dead_letter=2 is not known"),
        ({DEAD_LETTER_KEY: 1, "content": 5}, "holds no record"),
        ({DEAD_LETTER_KEY: 1, "id": "a", "text": None}, "text is missing"),
        ({DEAD_LETTER_KEY: 1, "id": "a", "text": "t", "metadata": [1]}, "metadata is a list"),
        ({DEAD_LETTER_KEY: 1, "id": "a", "text": "t", "chunk": -1}, "chunk=-1"),
        ({DEAD_LETTER_KEY: 1, "content": json.dumps({DEAD_LETTER_KEY: 1, "text": "t"}), "reason": "r"}, "r"),
    ],
    ids=range(6),
)
def test_a_damaged_letter_fails_alone(tmp_path, letter, reason):
    first, second = letters(tmp_path / "dead.jsonl", json.dumps(letter), '{"id": "b", "text": "t"}')
    assert isinstance(first, Rejected) and reason in first.reason
    assert first.where == f"{tmp_path / 'dead.jsonl'}:1"
    assert second == Record("b", "t")


def test_what_a_line_held_is_bounded(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": "x", "text": "' + "y" * (2 << 20))
    (item,) = read(path)
    assert len(item.content) == 1 << 20
    (again,) = letters(tmp_path / "dead.jsonl", dump_rejected(item))
    assert again.reason == item.reason


def letter(number, text="text"):
    return dump_record(Record(f"r{number}", text), where=f"x:{number}", reason="why")


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("size", "cut"), [(0, 5), (1 << 40, 1), (1 << 40, 60)])
def test_after_a_torn_line_the_next_letter_has_its_own(tmp_path, monkeypatch, cut, size):
    monkeypatch.setattr("millpond.ingest.pipeline.dead_letter_file._MAX_COMPARED", size)
    path = tmp_path / "dead.jsonl"
    first, second = letter(1), letter(2)
    path.write_text(f"{first}\n{second}"[: -len(second) + cut])
    for number in (2, 3):
        file = DeadLetterFile(path)
        file.add(letter(number))
        file.close()
    assert lines(path) == [first, second[:cut], second, letter(3)]
    records = list(read(path))
    assert [record.id for record in records if isinstance(record, Record)] == ["r1", "r2", "r3"]


@pytest.mark.parametrize(
    ("content", "replaces"), [('{"id": "a", "text": "t"}\n', True), ("a,b\n1,2\n", False), ("\n1\n", False)]
)
def test_a_file_of_something_else_is_neither_replaced_nor_appended_to(tmp_path, engine, content, replaces):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    source = path if replaces else [Record("a", "bad")]
    with pytest.raises(InvalidRequestError, match=r"dead_letters=.*line \d of this file is not a dead letter"):
        run(source, engine, Refusing(memory()), dead_letters=path)
    assert path.read_text() == content


@pytest.mark.parametrize("what", ["folder", "no folder"])
def test_a_path_that_is_no_file_is_refused_first(tmp_path, engine, what):
    path = tmp_path if what == "folder" else tmp_path / "absent" / "dead.jsonl"
    client = memory()
    with pytest.raises(InvalidRequestError, match="dead_letters="):
        run([Record("a", "bad")], engine, Refusing(client), dead_letters=path)
    assert not client


def test_letters_that_fail_again_stay_and_the_others_leave_the_file(tmp_path, engine):
    path = tmp_path / "dead.jsonl"
    source = [Record("a", "bad"), Record("b", "bad too"), Rejected(where="x:9", reason="none", content='{"id": 5}')]
    client = memory()
    assert run([*source, Record("c", "good")], engine, Refusing(client), dead_letters=path).failed == 3
    mended = path.read_text().replace("bad too", "good now")
    path.write_text(mended)
    report = run(path, engine, Refusing(client), dead_letters=path)
    assert (report.read, report.failed, report.written) == (3, 2, 1)
    assert {json.loads(line)["reason"] for line in lines(path)} == {"refused", "text is missing; it must be a str"}
    assert sorted(key for key, _ in CrashingSink(client).stored) == ["b", "c"]
    path.write_text("".join(line + "\n" for line in lines(path)).replace("bad", "good"))
    report = run(path, engine, Refusing(client), dead_letters=path)
    assert report.failed == 1 and len(lines(path)) == 1


def test_of_letters_that_are_read_nothing_is_lost_if_the_run_fails_or_stops(tmp_path, engine):
    path = tmp_path / "dead.jsonl"
    source = [Record(f"r{number}", f"bad {number}") for number in range(9)]
    run(source, engine, Refusing(memory()), dead_letters=path)
    before = lines(path)
    sink = Refusing(memory())
    path.write_text(path.read_text().replace("bad 8", "good"))

    class Broken(Refusing):
        def write(self, batch):
            raise OSError("gone")

    with small(2), pytest.raises(OSError, match="gone"):
        run(path, engine, Broken(memory()), dead_letters=path)
    assert len(lines(path)) == 9
    report = run(path, engine, sink, dead_letters=path)
    assert report.failed == 8 and lines(path) == before[:8]
    assert not path.with_name("dead.jsonl.next").exists()


_FULL = """
    import resource, signal, sys
    from millpond.errors import JournalError
    from millpond.ingest import Record
    from millpond.ingest.sources.json_file import dump_record
    from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = DeadLetterFile(sys.argv[1])
    letters = [dump_record(Record(str(n), "text " * 50), where="w", reason="r") for n in range(40)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    failed = 0
    for letter in letters:
        try:
            file.add(letter)
        except JournalError as error:
            failed += 1
            message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(failed, message)
    for letter in letters:
        file.add(letter)
    file.close(complete=True)
"""


@pytest.mark.contract
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no limit of file sizes on this system")
def test_a_full_disk_is_an_error_with_the_path_and_loses_no_letter_once_there_is_space(tmp_path):
    path = tmp_path / "dead.jsonl"
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_FULL), str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    failed, _, message = out.partition(" ")
    assert 20 < int(failed) < 40
    assert message.startswith(f"the dead letters {path} cannot be written") and "free some space" in message
    whole = [record for record in read(path) if isinstance(record, Record)]
    assert [record.id for record in whole] == [str(number) for number in range(40)]
    assert len(lines(path)) <= 41  # one torn


def test_threads_append_whole_lines(tmp_path):
    path = tmp_path / "dead.jsonl"
    files = DeadLetterFile(path), DeadLetterFile(path)  # as of two processes

    def work(name):
        for n in range(50):
            files[name % 2].add(letter(f"{name} {n}", "x" * n * 97))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    for file in files:
        file.close()
    found = [json.loads(line) for line in lines(path)]
    assert len({each["id"] for each in found}) == len(found) == 200 and all(DEAD_LETTER_KEY in each for each in found)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_device_is_written_to_and_not_read():
    """/dev/full is an endless file of zeros to a reader, and a full disk to a writer."""
    file = DeadLetterFile("/dev/full")
    with pytest.raises(JournalError, match="No space left"):
        file.add("letter")
    file.close()


def test_the_default_place_is_beside_the_journal(tmp_path, engine):
    run([Record("a", "bad")], engine, Refusing(memory()), journal=tmp_path / "j")
    assert len(lines(tmp_path / "j.dead.jsonl")) == 1
    (tmp_path / "empty").mkdir()
    os.chdir(tmp_path / "empty")
    run([Record("a", "bad")], engine, Refusing(memory()))
    assert not os.listdir()


def test_a_journal_is_no_file_for_dead_letters(tmp_path, engine):
    path = tmp_path / "j"
    letters = DeadLetterFile(path)  # before the journal exists
    with pytest.raises(InvalidRequestError, match="is the journal; name another file"):
        run([Record("a", "bad")], engine, Refusing(memory()), journal=path, dead_letters=letters)


def test_a_source_of_dead_letters_deletes_no_other_rows(tmp_path, engine):
    sink, journal, path = Refusing(memory()), tmp_path / "j", tmp_path / "j.dead.jsonl"
    run([Record("a", "bad"), Record("b", "good")], engine, sink, journal=journal)
    for given in (path, str(path)):
        with pytest.raises(InvalidRequestError, match="leave sync out"):
            run(given, engine, sink, journal=journal, sync=True)
    assert sink.stored == {("b", 0): "good"} and len(lines(path)) == 1
