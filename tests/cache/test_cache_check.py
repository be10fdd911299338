"""``millpond cache check|stats``: damage is counted honestly, and wrong input is named and left alone."""

from __future__ import annotations

import io
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cached import kept, names, script, store

from millpond import VectorCache
from millpond.cli.app import main
from millpond.errors import CacheError

ROWS = 600
PAGE = 4096
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cache.db"
    with VectorCache(path) as cache:
        store(cache, *range(ROWS))
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``millpond cache``, in this process."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["millpond", "cache", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def leaf_of(path: Path, number: int) -> int:
    """Where the page of a row begins: the last one that holds its vector in a live row."""
    connection = sqlite3.connect(path)
    (value,) = connection.execute("SELECT value FROM rows WHERE key = ?", names(number)).fetchone()
    connection.close()
    start = path.read_bytes().rfind(value)
    assert start > 0
    return start - start % PAGE


def test_an_intact_cache_is_intact_and_its_file_stays(path: Path, run: Run) -> None:
    before = path.read_bytes()
    code, out, _ = run("check", path)
    assert (code, json.loads(out)) == (
        0, {"path": str(path), "intact": True, "rows": ROWS, "damaged": 0, "problems": []}
    )  # fmt: skip
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["cache.db"]


def test_an_empty_cache_is_intact(tmp_path: Path, run: Run) -> None:
    VectorCache(tmp_path / "empty").close()
    assert run("check", tmp_path / "empty")[0] == 0
    assert json.loads(run("stats", tmp_path / "empty")[1])["widths"] == {}


def test_a_wrong_checksum_is_counted_until_the_vector_is_stored_again(path: Path, run: Run) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE rows SET checksum = checksum + 1 WHERE key = ?", names(7))
    connection.close()
    code, out, err = run("check", path)
    assert (code, json.loads(out)["rows"], json.loads(out)["damaged"]) == (1, ROWS - 1, 1)
    assert err == f"millpond: {path} is damaged; those vectors are recomputed\n"
    with VectorCache(path) as cache:
        assert kept(cache, *range(ROWS)) == [number for number in range(ROWS) if number != 7]
        store(cache, 7)
        assert cache.check().intact


def test_a_broken_page_costs_its_rows_only(path: Path, run: Run) -> None:
    overwrite(path, leaf_of(path, 300), b"\xff" * PAGE)
    code, out, err = run("check", path)
    found = json.loads(out)
    assert (code, found["intact"]) == (1, False)
    assert 0 < found["damaged"] < 40
    assert found["rows"] + found["damaged"] == ROWS
    assert found["problems"]
    assert "delete it" in err
    with VectorCache(path) as cache:  # every vector that a look-up finds by itself was counted
        assert sum(len(kept(cache, number)) for number in range(ROWS)) == found["rows"]


@pytest.mark.parametrize("page", [1, 3], ids=["root of the rows", "root of the uses"])
def test_a_table_that_cannot_be_read_is_a_problem_and_no_success(path: Path, page: int) -> None:
    overwrite(path, page * PAGE, b"\xff" * PAGE)
    with VectorCache(path) as cache:
        found = cache.check()
    assert not found.intact
    assert found.problems


def test_a_check_while_others_write(path: Path) -> None:
    stop = threading.Event()
    with VectorCache(path) as cache:

        def write() -> None:
            number = ROWS
            while not stop.is_set():
                store(cache, number)
                number += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(3):
                assert cache.check().intact
        finally:
            stop.set()
            thread.join()


def test_what_a_cache_holds(path: Path, run: Run) -> None:
    with VectorCache(path) as cache:
        store(cache, 1000, 1001, width=16)
        size = cache.stats().bytes
        assert cache.widths() == {16: 2, 48: ROWS}
    facts = json.loads(run("stats", path)[1])
    assert (facts["rows"], facts["widths"], facts["in_use"]) == (ROWS + 2, {"16": 2, "48": ROWS}, False)
    assert facts["bytes"] == size


@pytest.mark.contract
def test_a_cache_that_another_process_has_open_is_in_use(path: Path, run: Run) -> None:
    process = script(
        "cache = VectorCache(sys.argv[1]); print(len(cache), flush=True); sys.stdin.read()", path, stdin=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(ROWS)
    try:
        assert json.loads(run("stats", path)[1])["in_use"]
    finally:
        process.communicate("")
    assert not json.loads(run("stats", path)[1])["in_use"]


def foreign(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, key BLOB)")
    connection.close()


def newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(Path.unlink, "there is no such file", id="missing"),
        pytest.param(lambda path: (path.unlink(), path.mkdir()), "is not a file", id="folder"),
        pytest.param(lambda path: path.write_text("id,text\n" * 500), "is not a millpond cache", id="text"),
        pytest.param(lambda path: path.write_text("x"), "is not a millpond cache", id="one byte"),
        pytest.param(foreign, "another application", id="foreign"),
        pytest.param(newer, "schema version 99", id="newer"),
        pytest.param(lambda path: overwrite(path, 0, b"SQLite format 3\0" + bytes(84)), "delete it", id="header"),
    ],
)
def test_what_is_not_a_cache_is_named_and_left_alone(path: Path, run: Run, make: Any, reason: str) -> None:
    make(path)
    before = path.read_bytes() if path.is_file() else None
    for verb in ("check", "stats"):
        code, out, err = run(verb, path)
        assert (code, out) == (1, "")
        assert err.startswith("millpond: ")
        assert reason in err
        assert str(path) in err
        assert err.count("\n") == 1
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_home_that_does_not_exist_is_named() -> None:
    with pytest.raises(CacheError, match=r"~nobody-of-this-name.* is not a path here"):
        VectorCache("~nobody-of-this-name/cache.db")
