"""``millpond cache check|repair|stats``: damage is found, intact vectors survive it, and wrong input is named."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cached import FOLDERS, kept, names, script, store

from millpond.cache import blob_rows
from millpond.cache.repair import describe_cache, repair_cache
from millpond.cache.vector_cache import VectorCache
from millpond.errors import CacheError

ROWS = 600
PAGE = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cache.db"
    with VectorCache(path) as cache:
        store(cache, *range(ROWS))
    return path


def millpond(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)}
    return subprocess.run(
        [sys.executable, "-m", "millpond", "cache", *map(str, words)], capture_output=True, text=True, env=environment
    )


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def leaf_of(path: Path, number: int) -> int:
    """Where the page of a row begins: the last one that holds its key in a live row."""
    connection = sqlite3.connect(path)
    (value,) = connection.execute("SELECT value FROM rows WHERE key = ?", names(number)).fetchone()
    connection.close()
    start = path.read_bytes().rfind(value)
    assert start > 0
    return start - start % PAGE


def test_an_intact_cache_is_intact(path: Path) -> None:
    with VectorCache(path) as cache:
        found = cache.check()
        assert (found.rows, found.damaged, found.problems, found.intact) == (ROWS, 0, (), True)
    before = path.read_bytes()
    result = repair_cache(path)
    assert (result.rows, result.lost, result.damaged_file) == (ROWS, 0, None)
    assert path.read_bytes() == before
    assert sorted(file.name for file in path.parent.iterdir()) == ["cache.db"]


def test_an_empty_cache_is_intact(tmp_path: Path) -> None:
    with VectorCache(tmp_path / "empty") as cache:
        assert cache.check().intact
    assert repair_cache(tmp_path / "empty").rows == 0
    assert describe_cache(tmp_path / "empty").widths == {}


def test_one_bit_is_found_and_repaired(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE rows SET checksum = checksum + 1 WHERE key = ?", names(7))
    ticks = dict(connection.execute("SELECT id, tick FROM uses"))
    connection.close()
    with VectorCache(path) as cache:
        found = cache.check()
        assert (found.rows, found.damaged, found.problems, found.intact) == (ROWS - 1, 1, (), False)
    result = repair_cache(path)
    assert (result.rows, result.lost) == (ROWS - 1, 1)
    assert result.damaged_file is not None
    assert result.damaged_file.name.startswith("cache.db.damaged-")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with VectorCache(path) as cache:
        assert kept(cache, *range(ROWS)) == [number for number in range(ROWS) if number != 7]
        assert cache.check().intact
        store(cache, 7)
        assert kept(cache, 7) == [7]
    connection = sqlite3.connect(path)
    assert (
        dict(connection.execute("SELECT id, tick FROM uses")).items()
        >= {i: tick for i, tick in ticks.items() if i != 8}.items()
    )
    connection.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["cache.db", result.damaged_file.name]


def test_a_broken_page_costs_its_rows_only(path: Path) -> None:
    overwrite(path, leaf_of(path, 300), b"\xff" * PAGE)
    with VectorCache(path) as cache:
        found = cache.check()
        assert 0 < found.damaged < 40
        assert found.rows + found.damaged == ROWS
        assert found.problems
    result = repair_cache(path)
    assert (result.rows, result.lost) == (found.rows, found.damaged)
    with VectorCache(path) as cache:
        assert len(kept(cache, *range(ROWS))) == found.rows
        assert cache.check().intact


@pytest.mark.parametrize(
    ("start", "length"),
    [
        pytest.param(0, 16, id="magic"),
        pytest.param(0, 100, id="header"),
        pytest.param(0, PAGE, id="schema page"),
        pytest.param(68, 4, id="application id"),
        pytest.param(2 * PAGE, PAGE, id="root of the index of keys"),
        pytest.param(3 * PAGE, PAGE, id="root of the uses"),
        pytest.param(4 * PAGE, PAGE, id="root of the index of uses"),
    ],
)
def test_every_vector_survives_the_loss_of_a_page_that_holds_none(path: Path, start: int, length: int) -> None:
    overwrite(path, start, bytes(length))
    if length == 4:  # which is not damage that anybody could tell from another application's file
        with pytest.raises(CacheError, match="another application"):
            repair_cache(path)
        return
    result = repair_cache(path)
    assert (result.rows, result.lost) == (ROWS, 0)
    with VectorCache(path) as cache:
        assert kept(cache, *range(ROWS)) == list(range(ROWS))
        assert cache.check().intact


@pytest.mark.parametrize("left", [0.3, 0.5, 0.9])
def test_a_truncated_file_keeps_what_it_has(path: Path, left: float) -> None:
    os.truncate(path, int(path.stat().st_size * left))
    result = repair_cache(path)
    with VectorCache(path) as cache:
        assert len(kept(cache, *range(ROWS))) == result.rows == len(cache) > ROWS * left * 0.5
        assert cache.check().intact


@pytest.mark.parametrize("seed", range(25))
def test_random_damage_is_repaired_or_named(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    size = path.stat().st_size
    for _ in range(chance.choice([1, 5, 40])):
        start = chance.randrange(size)
        overwrite(path, start, chance.randbytes(min(chance.choice([1, 16, 4096]), size - start)))
    before = path.read_bytes()
    result = None
    with contextlib.suppress(CacheError):
        result = repair_cache(path)
    if result is None:
        with pytest.raises(CacheError, match=re.escape(str(path))):
            repair_cache(path)
        assert path.read_bytes() == before
        return
    with VectorCache(path) as cache:
        assert len(kept(cache, *range(ROWS))) == result.rows
        assert cache.check().intact
    if result.damaged_file is not None:
        assert result.damaged_file.read_bytes() == before


def test_rows_in_the_log_of_a_killed_process_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    process = script("cache = VectorCache(sys.argv[1]); store(cache, *range(500)); os.kill(os.getpid(), 9)", path)
    process.communicate(timeout=60)
    assert Path(f"{path}-wal").stat().st_size > 100_000
    overwrite(path, 0, bytes(100))
    result = repair_cache(path)
    with VectorCache(path) as cache:
        assert len(kept(cache, *range(500))) == result.rows == 500


def test_a_check_reads_a_few_rows_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_rows, "_ROWS_PER_SELECT", 7)
    with VectorCache(path) as cache:
        assert max(map(len, cache._file.rows())) == 7
        assert cache.check().rows == ROWS


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
            for _ in range(5):
                assert cache.check().intact
        finally:
            stop.set()
            thread.join()


def test_what_a_cache_holds(path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, 1000, 1001, width=16)
        facts = describe_cache(path)
        assert (facts.rows, facts.widths) == (ROWS + 2, {16: 2, 48: ROWS})
        assert facts.bytes == cache.stats().bytes
        assert facts.wal_bytes > 0


def test_the_command_prints_json_and_its_exit_code(path: Path) -> None:
    done = millpond("check", path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "path": str(path), "intact": True, "rows": ROWS, "damaged": 0, "problems": []
    }  # fmt: skip
    done = millpond("stats", path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["rows"], facts["widths"], facts["in_use"]) == (ROWS, {"48": ROWS}, False)
    overwrite(path, leaf_of(path, 300), b"\xff" * PAGE)
    done = millpond("check", path)
    assert done.returncode == 1
    assert not json.loads(done.stdout)["intact"]
    assert f"millpond cache repair {path}" in done.stderr
    done = millpond("repair", path)
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout)["damaged_file"]).exists()
    assert millpond("check", path).returncode == 0


def test_a_cache_that_another_process_has_open_is_not_repaired(path: Path) -> None:
    process = script(
        "cache = VectorCache(sys.argv[1]); print(len(cache), flush=True); sys.stdin.read()", path, stdin=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(ROWS)
    try:
        assert describe_cache(path).in_use
        with pytest.raises(CacheError, match="open in another process; end it"):
            repair_cache(path)
    finally:
        process.communicate("")
    assert not describe_cache(path).in_use


def missing(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def text(path: Path) -> None:
    path.write_text("id,text\n1,no database\n" * 500)


def empty_text(path: Path) -> None:
    path.write_text("x")


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
        (missing, "there is no such file"),
        (folder, "is not a file"),
        (text, "no"),
        (empty_text, "no"),
        (foreign, "another application"),
        (newer, "schema version 99"),
    ],
    ids=["missing", "folder", "text", "one byte", "foreign", "newer"],
)
def test_what_is_no_cache_is_named_and_left_alone(path: Path, make: Callable[[Path], Any], reason: str) -> None:
    make(path)
    before = path.read_bytes() if path.is_file() else None
    for call in (repair_cache, describe_cache):
        with pytest.raises(CacheError, match=reason) as caught:
            call(path)
        assert str(path) in str(caught.value)
    done = millpond("check", path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("millpond: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert (path.read_bytes() if path.is_file() else None) == before
    assert sorted(file.name for file in path.parent.iterdir()) == ([] if make is missing else [path.name])


def test_the_way_out_of_a_damaged_file_is_named(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    overwrite(path, 0, b"SQLite format 3\0" + bytes(84))
    with pytest.raises(CacheError, match=f"millpond cache repair {path}"):
        VectorCache(path)
