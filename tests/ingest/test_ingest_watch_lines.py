"""A collection is kept equal to a file of JSONL that grows, is cut, rotated or replaced."""

import json
import logging
import os

import pytest
from tests.ingest.crashes import memory
from tests.ingest.watching import watching

from millpond.errors import InvalidRequestError, SinkError, SourceNotFoundError
from millpond.ingest.sources.rows import Columns
from millpond.ingest.watch.open_source import open_source

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no inotify on this system")


def line(number, text="text"):
    return json.dumps({"id": f"r{number}", "text": f"{text} {number}"}) + "\n"


def rows(*numbers, text="text"):
    return {f"r{number}": f"{text} {number}" for number in numbers}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x" / "docs.jsonl"
    path.parent.mkdir()
    path.write_text("".join(map(line, range(5))))
    return path


@pytest.mark.parametrize("poll", [None, 0.1], ids=["notices", "poll"])
def test_lines_that_are_added_are_read_and_no_others(path, engine, tmp_path, poll):
    with watching(path, engine, tmp_path / "j", poll=poll) as watcher:
        assert watcher.texts == rows(*range(5))
        with path.open("a") as file:
            for number in (5, 6):
                file.write(line(number))
                file.flush()
                watcher.until_texts(rows(*range(number + 1)))
            file.write(line(1, "changed"))  # a later line replaces an earlier one
        watcher.until_texts({**rows(*range(7)), "r1": "changed 1"})
        assert watcher.written[5:] == ["r5", "r6", "r1"]
        watcher.until(lambda: watcher.state.now()["embedded"] == 8)


def test_a_last_line_without_its_end_is_read_when_it_is_whole(path, engine, tmp_path):
    path.write_text(path.read_text() + line(5).rstrip("\n"))  # whole, without a line end
    with watching(path, engine, tmp_path / "j") as watcher:
        assert watcher.texts == rows(*range(6))
        half, rest = line(6)[:20], line(6)[20:]
        with path.open("a") as file:
            file.write("\n" + half)
            file.flush()
            watcher.until_idle()
            assert watcher.texts == rows(*range(6)) and watcher.state.now()["failed"] == 0
            file.write(rest.rstrip("\n"))
            file.flush()
            watcher.until_texts(rows(*range(7)))
            file.write("\nno json\n" + line(7))
        watcher.until_texts(rows(*range(8)))
        assert watcher.state.now()["failed"] == 1 and f"{path}:8: not JSON" in watcher.state.last_error
        assert watcher.written[6:] == ["r6", "r7"]


def test_a_file_that_is_cut_loses_the_rows_of_what_it_lost_after_the_grace(path, engine, tmp_path):
    with watching(path, engine, tmp_path / "j", grace=0.5) as watcher:
        with path.open("r+") as file:
            file.truncate(len("".join(map(line, range(3)))))
        watcher.until(lambda: watcher.state.waiting == 2)
        assert watcher.texts == rows(*range(5))
        watcher.until_texts(rows(*range(3)))
        with path.open("a") as file:
            file.write(line(9))
        watcher.until_texts(rows(0, 1, 2, 9))
        assert watcher.written[5:] == ["r9"]


def test_a_file_that_is_replaced_is_read_as_a_whole(path, engine, tmp_path):
    with watching(path, engine, tmp_path / "j") as watcher:
        new = path.with_name("new")
        new.write_text("".join(map(line, (1, 2, 7))))
        os.replace(new, path)
        watcher.until_texts(rows(1, 2, 7))
        assert watcher.written[5:] == ["r7"]
        path.write_text("".join(map(line, (2, 1, 7))))  # of the same size, in place
        watcher.until_idle()
        path.write_text("".join(map(line, (2, 1, 8))))
        watcher.until_texts(rows(1, 2, 8))


def test_a_file_that_is_rotated_is_followed_and_what_was_rotated_away_stays_if_it_is_too_much(path, engine, tmp_path):
    with watching(path, engine, tmp_path / "j", sync_max=0.5, grace=0.2) as watcher:
        os.rename(path, path.with_suffix(".1"))
        path.write_text("")
        watcher.until(lambda: bool(watcher.state.held))
        with path.open("a") as file:
            file.write(line(10))
        watcher.until_texts(rows(*range(5), 10))
        with path.open("a") as file:
            file.write("".join(map(line, (11, 2, 3, 4))))
        watcher.until(lambda: not watcher.state.held and watcher.state.waiting == 0)
        assert watcher.texts == rows(2, 3, 4, 10, 11)


def test_the_next_watcher_reads_all_and_writes_what_is_new(path, engine, tmp_path):
    client = memory()
    with watching(path, engine, tmp_path / "j", client):
        pass
    path.write_text(line(0) + line(1, "new") + line(2) + line(3))
    with watching(path, engine, tmp_path / "j", client) as watcher:
        assert watcher.texts == {**rows(0, 2, 3), "r1": "new 1"} and watcher.written == ["r1"]


class _Writer(logging.Handler):
    """Writes a file when the watcher has found it empty."""

    def __init__(self, path, text):
        super().__init__()
        self._path, self._text = path, text

    def emit(self, record):
        if "reading the source again when it changes" in record.getMessage():
            self._path.write_text(self._text)


@pytest.mark.parametrize("poll", [None, 0.1], ids=["notices", "poll"])
def test_a_file_that_is_empty_at_the_start_since_somebody_writes_it_anew_is_read_again(path, engine, tmp_path, poll):
    client = memory()
    with watching(path, engine, tmp_path / "j", client):
        pass
    writer, logger = _Writer(path, path.read_text()), logging.getLogger("millpond.ingest.watch.watcher")
    path.write_text("")
    logger.addHandler(writer)
    try:
        with watching(path, engine, tmp_path / "j", client, poll=poll, grace=20 if poll is None else 0.2) as watcher:
            assert watcher.texts == rows(*range(5)) and not watcher.written
    finally:
        logger.removeHandler(writer)
    path.write_text("")
    with (
        pytest.raises(SinkError, match="5 of the 5 rows"),
        watching(path, engine, tmp_path / "j", client, poll=poll, grace=0.1),
    ):
        pass


def test_names_of_keys_are_those_of_ingest(tmp_path, engine):
    path = tmp_path / "docs.ndjson"
    path.write_text('{"url": "a", "title": "Mill", "body": "turns"}\n')
    columns = Columns(id="url", text=["title", "body"], metadata=[])
    with watching(path, engine, tmp_path / "j", columns=columns) as watcher:
        assert watcher.texts == {"a": "Mill turns"}


def test_a_source_that_cannot_be_watched_is_named(tmp_path):
    (tmp_path / "x.csv").write_text("id,text\n")
    for name, error, message in (
        ("x.csv", InvalidRequestError, "cannot be watched; pass a folder, a .jsonl"),
        ("none", SourceNotFoundError, "there is no folder or file"),
        ("none.jsonl", SourceNotFoundError, "there is no file"),
    ):
        with pytest.raises(error, match=message):
            open_source(str(tmp_path / name))
    with pytest.raises(InvalidRequestError, match="the path of the source is empty"):
        open_source("")
    with pytest.raises(InvalidRequestError, match="updated='at' is of a table"):
        open_source(str(tmp_path), updated="at")
    with pytest.raises(InvalidRequestError, match="poll=0 must be"):
        open_source(str(tmp_path), poll=0)
    with pytest.raises(InvalidRequestError, match="have no columns"):
        open_source(str(tmp_path), Columns(id="url"))
