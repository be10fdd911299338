"""trace and the notes of runs: what a row, its collection and its source still say of where it comes from."""

import re
from pathlib import Path

import pytest
from tests.ingest.crashes import CrashingSink, Words, memory, run, some
from tests.ingest.memory_sink import MemorySink

import millpond
from millpond.ingest import Record, RunNote, content_hash, copy, ingest, point_id, trace
from millpond.testing import WordEngine
from millpond.testing.sink import fill


def test_runs_are_noted_with_their_source_and_chunks(engine, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("the mill at the pond")
    client = memory()
    run(some(3), engine, CrashingSink(client))
    run(some(4), engine, CrashingSink(client), journal=tmp_path / "j")
    run(str(tmp_path / "docs"), engine, CrashingSink(client))
    sink = CrashingSink(client)
    lists, folder = sink.open().runs
    assert (lists.command, lists.source, lists.chunking, lists.version) == ("ingest", "list", "", millpond.__version__)
    assert lists.runs == 2 and lists.first < lists.last and re.fullmatch(r"\d{4}-\d\d-\d\dT.*\+00:00", lists.first)
    assert (folder.source, folder.runs) == (str(tmp_path / "docs"), 1)
    assert sink.last_run() == folder.run != lists.run
    run(some(4), engine, CrashingSink(client), journal=tmp_path / "j")  # writes nothing
    assert CrashingSink(client).open().runs == (lists, folder)


def test_the_rule_of_chunks_is_noted(engine):
    client = memory()
    run([Record("a", "one two three four")], engine, CrashingSink(client), chunker=Words(2))
    (note,) = CrashingSink(client).open().runs
    assert note.chunking == "words 2"


def test_the_list_is_bounded_and_reads_what_a_later_version_adds():
    notes: tuple[RunNote, ...] = ()
    for number in range(40):
        notes = RunNote.now("ingest", f"/docs/{number}").after(notes)
    assert [note.source for note in notes] == [f"/docs/{number}" for number in range(24, 40)]
    assert RunNote.from_json({**notes[0].to_json(), "later": 1}) == notes[0]


def test_a_copy_keeps_the_runs_of_its_source(engine):
    client = memory()
    run(some(3), engine, CrashingSink(client))
    source, target = CrashingSink(client), MemorySink(client, "copied")
    copy(source, target, show_progress=False)
    first, second = target.open().runs
    assert first == source.open().runs[0]
    assert (second.command, second.source) == ("copy", source.target)


@pytest.fixture
def chunked(engine, tmp_path):
    """Two files of a folder, of which one has three pieces."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "long.txt").write_text("one two three four five six seven")
    (folder / "short.txt").write_text("the pond")
    client = memory()
    run(folder, engine, CrashingSink(client), chunker=Spans(3))
    return CrashingSink(client), folder


class Spans(Words):
    """Cuts at single spaces, and notes where."""

    def split(self, record):
        words = record.text.split(" ")
        if len(words) <= self.words:
            return [record]
        pieces, start = [], 0
        for number in range(0, len(words), self.words):
            text = " ".join(words[number : number + self.words])
            span = {"chunk": len(pieces), "chunk_start": start, "chunk_end": start + len(text)}
            pieces.append(Record(record.id, text, {**record.metadata, **span}, chunk=len(pieces)))
            start += len(text) + 1
        return pieces


def test_a_record_is_traced_by_its_id_to_all_its_chunks(chunked):
    sink, folder = chunked
    found = trace(sink, "long.txt")
    assert [(each.chunk, each.span, each.text) for each in found] == [
        (0, (0, 13), "one two three"),
        (1, (14, 27), "four five six"),
        (2, (28, 33), "seven"),
    ]
    for number, each in enumerate(found):
        assert each.row_id == point_id("long.txt", number) and each.record_id == "long.txt" and not each.by_framework
        assert each.content_hash == content_hash(each.text) and each.hash_fits is True
        assert each.norms == {48: pytest.approx(1, abs=1e-5)} and each.characters == len(each.text)
        assert (each.file.path, each.file.state) == (str(folder / "long.txt"), "has the text")
        assert each.runs[0].source == str(folder) and each.runs[0].chunking == "words 3"


def test_a_row_is_traced_by_its_own_id(chunked):
    sink, _ = chunked
    (found,) = trace(sink, point_id("long.txt", 1))
    assert (found.chunk, found.text) == (1, "four five six")
    (upper,) = trace(sink, point_id("long.txt", 1).upper())
    assert upper == found
    (short,) = trace(sink, "short.txt")
    assert (short.chunk, short.span, short.text) == (None, None, "the pond")


def test_an_unknown_id_has_no_rows(chunked):
    assert trace(chunked[0], "long") == [] == trace(chunked[0], point_id("long"))


def test_a_file_that_changed_or_went_is_named(chunked):
    sink, folder = chunked
    (folder / "long.txt").write_text("one two three, and nothing else")
    (folder / "short.txt").unlink()
    assert [each.file.state for each in trace(sink, "long.txt")] == [
        "has the text", "has another text", "has another text",
    ]  # fmt: skip
    (short,) = trace(sink, "short.txt")
    assert (short.file.path, short.file.state) == (str(folder / "short.txt"), "is not there")
    (folder / "short.txt").write_bytes(b"\xff\xfe\x00pond")
    assert trace(sink, "short.txt")[0].file.state == "is not compared"


def test_the_file_that_the_metadata_names_is_looked_at(engine, tmp_path):
    path = tmp_path / "guide.md"
    path.write_text("# Mills\r\n\r\nthe  pond\r\nand the weir\r\n")
    client = memory()
    run([Record("guide#1", "the  pond\nand the weir", {"path": str(path)})], engine, CrashingSink(client))
    (found,) = trace(CrashingSink(client), "guide#1")
    assert (found.file.path, found.file.state) == (str(path), "has the text")


@pytest.mark.parametrize(
    ("name", "lines", "state"),
    [
        ("a.md", {"first_line": 2, "last_line": 3}, "has the text"),
        ("a.md", {"first_line": 1, "last_line": 2}, "has the text in other lines"),
        ("a.md", {"first_line": 3, "last_line": 2}, "has the text"),
        ("a.md", {"first_line": "2"}, "has the text"),
        ("b.md", {"first_line": 1, "last_line": 9}, "has another text"),
        ("b.html", {}, "is not compared"),
        ("none.md", {}, "is not there"),
    ],
)
def test_the_lines_that_the_metadata_names_are_looked_at(engine, tmp_path, name, lines, state):
    (tmp_path / "a.md").write_text("# Mills\nthe pond\nthe weir\n")
    (tmp_path / "b.md").write_text("# Mills\n")
    (tmp_path / "b.html").write_text("<p>the pond<br>the weir</p>")
    client = memory()
    run([Record("x", "the pond\nthe weir", {"path": name, **lines})], engine, CrashingSink(client))
    sink = CrashingSink(client)
    (found,) = trace(sink, "x")
    assert found.file is None  # nothing says which folder it was in
    sink.note_run("one", RunNote.now("ingest", str(tmp_path)))
    (found,) = trace(CrashingSink(client), "x")
    if state == "is not there":  # it may be of the other run, which read no folder
        assert found.file is None
    else:
        assert (found.file.path, found.file.state) == (str(tmp_path / name), state)


def test_a_text_that_was_edited_and_a_row_of_a_framework_are_named():
    words = WordEngine()
    sink = MemorySink(memory(), "docs", dimensions=[384])
    fill(sink, words, [Record("a", "the weir")], [384])
    record, kept = sink._driver.rows[point_id("a")]
    fetch = sink._driver.fetch

    def edited(row_ids, widths, manifest):
        from dataclasses import replace

        return {
            row_id: replace(row, content_hash=content_hash("before"))
            for row_id, row in fetch(row_ids, widths, manifest).items()
        }

    sink._driver.fetch = edited
    (found,) = trace(sink, "a")
    assert found.hash_fits is False
    sink._driver.fetch = fetch
    own = "f3b0a7c0-0c5e-4c5f-8d4e-6a5f0a6f7b11"
    sink._driver.rows[own] = (Record(own, record.text), kept)
    (found,) = trace(sink, own)
    assert found.by_framework and found.file is None and found.runs == ()


def test_a_path_that_is_given_relative_is_noted_absolute(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs.jsonl").write_text('{"id": "a", "text": "the mill"}\n')
    client = memory()
    ingest("docs.jsonl", engine=engine, sink=CrashingSink(client), show_progress=False)
    (note,) = CrashingSink(client).open().runs
    assert note.source == str(tmp_path / "docs.jsonl")
