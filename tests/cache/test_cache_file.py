"""The cache's file: private, identified, migrated; a foreign file is an error, a damaged row is not found."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import shutil
import sqlite3
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cached import kept, store, vector
from tests.tiny import write_checkpoint

from millpond import Engine, VectorCache
from millpond.cache import blob_store
from millpond.errors import CacheError, MillpondError, ModelLoadError


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
    assert int.from_bytes(header[68:72], "big") == blob_store.APPLICATION_ID
    assert int.from_bytes(header[60:64], "big") == len(blob_store.MIGRATIONS)


def test_an_empty_file_is_taken_and_made_private(path: Path) -> None:
    path.touch(mode=0o644)
    with VectorCache(path) as cache:
        store(cache, 1)
        assert kept(cache, 1) == [1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def foreign_text(path: Path) -> None:
    path.write_text("id,text\n1,not a database\n" * 200)


def foreign_short(path: Path) -> None:
    path.write_bytes(b"x")


def foreign_database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, key BLOB)")
    connection.close()


def foreign_wal_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE other (id INTEGER PRIMARY KEY)")
    connection.close()


@pytest.mark.parametrize("make", [foreign_text, foreign_short, foreign_database, foreign_wal_database])
def test_a_foreign_file_is_refused_and_left_alone(path: Path, make: Any) -> None:
    make(path)
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(CacheError, match="choose another path") as caught:
        VectorCache(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, MillpondError)
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [file.name for file in path.parent.iterdir()] == [path.name]


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


def test_an_engine_refuses_its_cache_before_it_loads_the_model(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "cache.db"
    with pytest.raises(CacheError, match="there is no folder"):
        Engine(tmp_path / "no model", cache=path)


def test_a_model_that_cannot_be_loaded_leaves_no_cache_open(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        Engine(tmp_path / "no model", cache=path)
    assert [file.name for file in path.parent.iterdir()] == ["cache.db"]  # no write-ahead log


def test_a_newer_schema_is_refused(path: Path) -> None:
    VectorCache(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(CacheError, match=r"schema version 99.*upgrade millpond") as caught:
        VectorCache(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before


# A file with 12 vectors, written by ``store(cache, *range(12))`` with the code of commit 1f86851.
OLD_FILE = Path(__file__).with_name("written_by_1f86851.cache")


def header_and_schema(path: Path) -> list[Any]:
    connection = sqlite3.connect(path)
    rows = [connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version", "page_size")]
    rows += connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name").fetchall()
    connection.close()
    return rows


def test_a_file_of_an_earlier_version_is_read_and_written(path: Path) -> None:
    """Old caches stay readable: keys, rows, checksums and schema have not changed."""
    shutil.copy(OLD_FILE, path)
    with VectorCache(path, max_bytes=1 << 20) as cache:
        assert kept(cache, *range(20)) == list(range(12))
        store(cache, *range(10, 20))
        assert kept(cache, *range(20)) == list(range(20))
        assert len(cache) == 20


def test_a_file_written_today_is_what_earlier_versions_wrote(path: Path, tmp_path: Path) -> None:
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
    assert len(rows[0]) == 24
    assert rows[0] == rows[1]


def test_an_older_schema_is_brought_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with VectorCache(path) as cache:
        store(cache, 1, 2, 3)
    monkeypatch.setattr(
        blob_store,
        "MIGRATIONS",
        (*blob_store.MIGRATIONS, ("CREATE TABLE later (id INTEGER)", "INSERT INTO later VALUES (7)")),
    )
    for _ in range(2):  # the second time nothing is left to migrate
        with VectorCache(path) as cache:
            assert kept(cache, 1, 2, 3) == [1, 2, 3]
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    assert connection.execute("SELECT * FROM later").fetchall() == [(7,)]
    connection.close()


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with VectorCache(path) as cache:
        store(cache, 1)
    with monkeypatch.context() as patch:
        patch.setattr(
            blob_store, "MIGRATIONS", (*blob_store.MIGRATIONS, ("CREATE TABLE later (id INTEGER)", "NONSENSE"))
        )
        with pytest.raises(CacheError):
            VectorCache(path)
    with VectorCache(path) as cache:
        assert kept(cache, 1) == [1]


@pytest.mark.parametrize("left", [1, 100, 4097, 0.5, -4096])
def test_a_truncated_file_is_an_error(path: Path, left: float) -> None:
    with VectorCache(path) as cache:
        store(cache, *range(600))
    size = path.stat().st_size
    os.truncate(path, int(size * left) if 0 < left < 1 else int(left % size))
    with pytest.raises(CacheError, match="delete it") as caught:
        VectorCache(path)
    assert str(path) in str(caught.value)


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


def test_a_page_that_cannot_be_read_is_no_error_of_a_lookup(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """sqlite refuses a whole query for a broken page; the vectors of the others are computed again, too."""
    with VectorCache(path) as cache:
        store(cache, *range(600))
    data = bytearray(path.read_bytes())
    (start,) = offsets(bytes(data), vector(300).tobytes())[-1:]
    page = start - start % 4096
    data[page : page + 8] = b"\xff" * 8  # the header of a leaf of the table
    path.write_bytes(data)
    with VectorCache(path) as cache:
        right = kept(cache, *range(600))
        assert 300 not in right
        assert len(damages(caplog)) == 1


def test_an_engine_computes_a_damaged_row_again_and_replaces_it(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    texts = [f"text {number}" for number in range(20)]
    with Engine(folder, cache=path, device="cpu", dtype="float32") as engine:
        before = engine.embed(texts)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE rows SET checksum = checksum + 1 WHERE id <= 5")
    connection.close()
    with Engine(folder, cache=path, device="cpu", dtype="float32") as engine:
        again = engine.embed(texts)
        assert np.flatnonzero(~again.cached).size == 5
        np.testing.assert_allclose(again.embeddings, before.embeddings, atol=1e-6)
        assert engine.embed(texts).cached.all()
    assert len(damages(caplog)) == 1


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


def test_a_file_copied_elsewhere_is_the_same_cache(path: Path, tmp_path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, *range(50))
    shutil.copy(path, tmp_path / "copy.db")
    with VectorCache(tmp_path / "copy.db") as cache:
        assert kept(cache, *range(50)) == list(range(50))
