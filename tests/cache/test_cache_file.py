"""The cache's file: private, identified, checked; a foreign file is an error, a damaged row is not found."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import re
import runpy
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cached import kept, names, store, vector

from millpond import Engine, VectorCache
from millpond.errors import CacheError, ModelLoadError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


def test_file_is_private_and_holds_no_text(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    with VectorCache(path) as cache:
        cache.put(
            VectorCache.keys("a secret namespace", ["a secret text"]), np.ones((1, 8)), tokens=[3], truncated=[False]
        )
        files = sorted(path.parent.iterdir())
        assert [file.name for file in files] == ["cache.db", "cache.db-shm", "cache.db-wal"]
        for file in files:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert b"secret" not in file.read_bytes()
        assert cache.path == path
    assert [file.name for file in path.parent.iterdir()] == ["cache.db"]
    header = path.read_bytes()[:100]
    assert int.from_bytes(header[68:72], "big") == int.from_bytes(b"MPND", "big")
    assert int.from_bytes(header[60:64], "big") == 1


def test_an_empty_file_is_taken_and_made_private(path: Path) -> None:
    path.touch(mode=0o644)
    with VectorCache(path) as cache:
        store(cache, 1)
        assert kept(cache, 1) == [1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["missing/cache.db", "missing/folders/cache.db", "file/cache.db", "dangling/cache.db"])
def test_a_folder_that_does_not_exist_is_named_and_not_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    path = tmp_path / name
    with pytest.raises(CacheError, match=r"there is no folder .* create it first, or choose another path") as caught:
        VectorCache(path)
    assert str(path) in str(caught.value)
    assert repr(str(path.parent)) in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dangling", "file"]


def test_an_engine_opens_its_cache_before_it_loads_the_model_and_closes_it_if_it_cannot(
    path: Path, tmp_path: Path
) -> None:
    with pytest.raises(CacheError, match="there is no folder"):
        Engine(tmp_path / "no model", cache=tmp_path / "missing" / "cache.db")
    with pytest.raises(ModelLoadError):
        Engine(tmp_path / "no model", cache=path)
    assert [file.name for file in path.parent.iterdir()] == ["cache.db"]  # no write-ahead log


# A file with 12 vectors, written by ``store(cache, *range(12))`` with the code of commit 1f86851.
OLD_FILE = Path(__file__).with_name("written_by_1f86851.cache")


def header_and_schema(path: Path) -> list[Any]:
    connection = sqlite3.connect(path)
    rows = [connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version", "page_size")]
    rows += connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name").fetchall()
    connection.close()
    return rows


def test_a_file_of_an_earlier_version_is_read_and_is_what_is_written_today(path: Path, tmp_path: Path) -> None:
    """Old caches stay readable: keys, rows, checksums and schema have not changed."""
    shutil.copy(OLD_FILE, path)
    new = tmp_path / "new.db"
    with VectorCache(new) as cache:
        store(cache, *range(12))
    assert header_and_schema(new) == header_and_schema(path)
    rows = []
    for file in (path, new):
        connection = sqlite3.connect(file)
        rows.append(connection.execute("SELECT key, id, meta, checksum, value FROM rows ORDER BY key").fetchall())
        rows[-1] += connection.execute("SELECT id, tick FROM uses ORDER BY id").fetchall()
        connection.close()
    assert len(rows[0]) == 24 and rows[0] == rows[1]
    with VectorCache(path, max_bytes=1 << 20) as cache:
        assert kept(cache, *range(20)) == list(range(12))
        store(cache, *range(10, 20))
        assert kept(cache, *range(20)) == list(range(20)) and len(cache) == 20


def offsets(data: bytes, part: bytes) -> list[int]:
    """Offsets of ``part`` in the file: one in a live page, and perhaps more in remains of pages that sqlite moved."""
    return [match.start() for match in re.finditer(re.escape(part), data)]


def damages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("part", ["vector", "metadata"])
def test_a_damaged_row_is_not_found_and_reported_once(path: Path, part: str, caplog: pytest.LogCaptureFixture) -> None:
    number = 58  # meta is 58 << 1 (not truncated): one byte, before at most five of the checksum and the vector
    with VectorCache(path) as cache:
        store(cache, *range(64))
    data = bytearray(path.read_bytes())
    starts = offsets(bytes(data), vector(number).tobytes())
    assert starts
    for start in starts:
        if part == "vector":
            data[start + 17] ^= 1  # one bit inside a mantissa
        else:
            meta = data.rfind(bytes([number << 1]), start - 7, start)
            assert meta > 0
            data[meta] ^= 2  # another number of tokens
    path.write_bytes(data)
    others = [other for other in range(64) if other != number]
    with VectorCache(path) as cache:
        assert kept(cache, *range(64)) == others
        assert kept(cache, *range(64)) == others
        (message,) = damages(caplog)
        assert str(path) in message
        assert "1 of 64" in message
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.damaged) == (126, 2, 2)
        store(cache, number)
        assert kept(cache, *range(64)) == list(range(64))
        assert cache.stats().damaged == 2


def test_swapped_rows_are_not_found(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Intact vectors under the wrong keys: only a checksum that covers the key notices."""
    with VectorCache(path) as cache:
        store(cache, 1, 2)
    connection = sqlite3.connect(path, isolation_level=None)
    rows = dict(connection.execute("SELECT id, key FROM rows"))
    first, second = rows
    connection.execute("UPDATE rows SET key = x'00' WHERE id = ?", (first,))
    connection.execute("UPDATE rows SET key = ? WHERE id = ?", (rows[first], second))
    connection.execute("UPDATE rows SET key = ? WHERE id = ?", (rows[second], first))
    connection.close()
    with VectorCache(path) as cache:
        assert kept(cache, 1, 2) == []
        assert len(damages(caplog)) == 1
        store(cache, 1, 2)
        assert kept(cache, 1, 2) == [1, 2]


@pytest.mark.parametrize(
    "change",
    [
        "meta = NULL",
        "meta = 'x'",
        "meta = meta + 4294967296",
        "meta = meta - 4294967296",
        "checksum = NULL",
        "checksum = -1",
        "value = 'text'",
        "value = CAST(x'ff' AS TEXT)",
        "value = 1.5",
        "value = NULL",
        "value = x''",
        "value = substr(value, 1, 7)",
    ],
)
def test_columns_of_another_type_are_not_found_and_replaced(
    path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    with VectorCache(path) as cache:
        store(cache, 1, 2)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA writable_schema=ON")
    connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
    connection.close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"UPDATE rows SET {change} WHERE id = 1")
    connection.close()
    with VectorCache(path, max_bytes=1 << 20 if "value" in change else None) as cache:
        assert kept(cache, 1) == []
        assert len(damages(caplog)) == 1
        assert kept(cache, 2) == [2]
        store(cache, 1)
        assert kept(cache, 1, 2) == [1, 2]
        assert len(cache) == 2


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 60))])
def test_random_damage_never_gives_a_wrong_vector(tmp_path: Path, seed: int) -> None:
    """Bytes overwritten anywhere: each row is returned right, or missing; only opening and writing may fail."""
    chance = random.Random(seed)
    path = tmp_path / "cache.db"
    with VectorCache(path) as cache:
        store(cache, *range(200))
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 3, 30])):
        start = chance.randrange(len(data))
        for offset in range(start, min(len(data), start + chance.choice([1, 8, 512, 4096]))):
            data[offset] = chance.randrange(256)
    path.write_bytes(data)
    with contextlib.suppress(CacheError), VectorCache(path, max_bytes=1 << 20) as cache:
        for number in range(200):
            kept(cache, number)
        store(cache, *range(100, 300))
        kept(cache, *range(300))
        cache.stats()
        cache.clear()


def test_clear_empties_the_file(path: Path) -> None:
    with VectorCache(path) as cache:
        empty = cache.stats().bytes
        store(cache, *range(500))
        full = path.stat().st_size + Path(f"{path}-wal").stat().st_size
        cache.clear()
        assert len(cache) == 0
        assert kept(cache, *range(500)) == []
        assert cache.stats().bytes == empty
        assert path.stat().st_size + Path(f"{path}-wal").stat().st_size < full / 4
        for file in path.parent.iterdir():
            assert vector(3).tobytes() not in file.read_bytes()
        store(cache, 1)
        assert kept(cache, 1) == [1]


# --- Checks: ``millpond cache check|stats`` ---------------------------------------------------------------------------


ROWS = 600
PAGE = 4096
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def filled(path: Path) -> Path:
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
            runpy.run_module("millpond", run_name="__main__")
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


def test_an_intact_cache_is_intact_and_its_file_stays(filled: Path, run: Run) -> None:
    before = filled.read_bytes()
    code, out, _ = run("check", filled)
    assert (code, json.loads(out)) == (
        0, {"path": str(filled), "intact": True, "rows": ROWS, "damaged": 0, "problems": []}
    )  # fmt: skip
    assert filled.read_bytes() == before
    assert [file.name for file in filled.parent.iterdir()] == ["cache.db"]


def test_a_wrong_checksum_is_counted_until_the_vector_is_stored_again(filled: Path, run: Run) -> None:
    connection = sqlite3.connect(filled, isolation_level=None)
    connection.execute("UPDATE rows SET checksum = checksum + 1 WHERE key = ?", names(7))
    connection.close()
    code, out, err = run("check", filled)
    assert (code, json.loads(out)["rows"], json.loads(out)["damaged"]) == (1, ROWS - 1, 1)
    assert err == f"millpond: {filled} is damaged; those vectors are recomputed\n"
    with VectorCache(filled) as cache:
        assert kept(cache, *range(ROWS)) == [number for number in range(ROWS) if number != 7]
        store(cache, 7)
        assert cache.check().intact


def test_a_broken_page_costs_its_rows_only(filled: Path, run: Run) -> None:
    overwrite(filled, leaf_of(filled, 300), b"\xff" * PAGE)
    code, out, err = run("check", filled)
    found = json.loads(out)
    assert (code, found["intact"]) == (1, False)
    assert 0 < found["damaged"] < 40
    assert found["rows"] + found["damaged"] == ROWS
    assert found["problems"]
    assert "delete it" in err
    with VectorCache(filled) as cache:  # every vector that a look-up finds by itself was counted
        assert sum(len(kept(cache, number)) for number in range(ROWS)) == found["rows"]


@pytest.mark.parametrize("page", [1, 3], ids=["root of the rows", "root of the uses"])
def test_a_table_that_cannot_be_read_is_a_problem_and_no_success(filled: Path, page: int) -> None:
    overwrite(filled, page * PAGE, b"\xff" * PAGE)
    with VectorCache(filled) as cache:
        found = cache.check()
    assert not found.intact
    assert found.problems


def test_what_a_cache_holds(filled: Path, run: Run) -> None:
    with VectorCache(filled) as cache:
        store(cache, 1000, 1001, width=16)
        size = cache.stats().bytes
        assert cache.widths() == {16: 2, 48: ROWS}
    facts = json.loads(run("stats", filled)[1])
    assert (facts["rows"], facts["widths"]) == (ROWS + 2, {"16": 2, "48": ROWS})
    assert facts["bytes"] == size


def foreign(path: Path, mode: str = "delete") -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, key BLOB)")
    connection.close()
    path.chmod(0o644)


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
        pytest.param(lambda path: foreign(path, "wal"), "another application", id="foreign with a log"),
        pytest.param(newer, "schema version 99", id="newer"),
        pytest.param(lambda path: overwrite(path, 0, b"SQLite format 3\0" + bytes(84)), "delete it", id="header"),
        pytest.param(lambda path: os.truncate(path, 4097), "delete it", id="truncated"),
    ],
)
def test_what_is_not_a_cache_is_named_and_left_alone(filled: Path, run: Run, make: Any, reason: str) -> None:
    make(filled)
    before = (filled.read_bytes(), filled.stat().st_mode) if filled.is_file() else None
    for verb in ("check", "stats"):
        code, out, err = run(verb, filled)
        assert (code, out) == (2, "")
        assert err.startswith("millpond: ")
        assert reason in err
        assert str(filled) in err
        assert err.count("\n") == 1
    assert ((filled.read_bytes(), filled.stat().st_mode) if filled.is_file() else None) == before
    assert [file.name for file in filled.parent.iterdir()] == ([filled.name] if filled.exists() else [])
