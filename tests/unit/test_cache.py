"""VectorCache: what was put comes back bit for bit, or not at all, or the file is named as damaged."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millpond
from millpond import rowfile, sqlitefile
from millpond.cache import CacheStats, VectorCache
from millpond.errors import CacheError, InvalidRequestError, MillpondError

WIDTH = 48
FloatArray = npt.NDArray[np.float32]


def names(*numbers: int, namespace: str = "test") -> list[bytes]:
    return VectorCache.keys(namespace, [f"text {number}" for number in numbers])


def vector(number: int, width: int = WIDTH) -> FloatArray:
    """The vector that belongs to ``names(number)``: another number's differs in every float."""
    return (np.arange(width, dtype=np.float32) + 1) / np.float32(7) * np.float32(number + 1)


def store(cache: VectorCache, *numbers: int, width: int = WIDTH) -> None:
    cache.put(
        names(*numbers),
        np.stack([vector(number, width) for number in numbers]),
        tokens=[number % 1000 for number in numbers],
        truncated=[number % 3 == 0 for number in numbers],
    )


def kept(cache: VectorCache, *numbers: int, width: int = WIDTH) -> list[int]:
    """The numbers that the cache still has; whatever it has must be right."""
    hits = cache.get(names(*numbers), width=width)
    for place, number in enumerate(numbers):
        if hits.found[place]:
            np.testing.assert_array_equal(hits.rows[place], vector(number, width))
            assert hits.tokens[place] == number % 1000
            assert hits.truncated[place] == (number % 3 == 0)
        else:
            assert not hits.rows[place].any()
            assert hits.tokens[place] == 0
            assert not hits.truncated[place]
    return [number for place, number in enumerate(numbers) if hits.found[place]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


def script(body: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A fresh interpreter that runs ``body`` after this module's helpers."""
    helpers = textwrap.dedent(
        f"""
        import os, sys
        sys.path[:0] = {[str(Path(millpond.cache.__file__).parents[1]), str(Path(__file__).parent)]!r}
        import numpy as np
        from millpond.cache import VectorCache
        from millpond.errors import CacheError
        from {Path(__file__).stem} import kept, names, store, vector
        """
    )
    return subprocess.Popen(
        [sys.executable, "-c", helpers + textwrap.dedent(body), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


# Keys


@given(st.text(), st.text(), st.text(), st.text())
def test_different_pairs_have_different_keys(a: str, b: str, c: str, d: str) -> None:
    assert (VectorCache.key(a, b) == VectorCache.key(c, d)) == ((a, b) == (c, d))


@given(st.text(min_size=1), st.text())
def test_moving_the_border_changes_the_key(a: str, b: str) -> None:
    assert VectorCache.key(a, b) != VectorCache.key(a[:-1], a[-1] + b)


@given(st.text(), st.lists(st.text()))
def test_keys_are_key_of_each(namespace: str, texts: list[str]) -> None:
    keys = VectorCache.keys(namespace, texts)
    assert keys == [VectorCache.key(namespace, text) for text in texts]
    assert all(type(key) is bytes and len(key) == 32 for key in keys)


def test_key_is_stable_across_versions() -> None:
    """A golden value: a change of it empties every cache in the field."""
    assert VectorCache.key("namespace", "täxt").hex() == GOLDEN


def test_lone_surrogates_have_keys() -> None:
    assert VectorCache.key("a", "\ud800") != VectorCache.key("a", "\ud801")


# Vectors


def test_rows_come_back_bit_for_bit(path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((700, 384), dtype=np.float32)
    rows[0, :4] = [-0.0, 1e-45, np.finfo(np.float32).max, np.finfo(np.float32).tiny]
    keys = names(*range(700))
    with VectorCache(path) as cache:
        cache.put(keys, rows, tokens=np.arange(700), truncated=np.arange(700) % 2 == 0)
    with VectorCache(path) as cache:
        order = generator.permutation(700)
        hits = cache.get([keys[index] for index in order], width=384)
    assert hits.found.all()
    assert hits.rows.dtype == np.float32
    assert hits.rows.tobytes() == rows[order].tobytes()
    assert hits.tokens.dtype == np.int32
    np.testing.assert_array_equal(hits.tokens, order)
    np.testing.assert_array_equal(hits.truncated, order % 2 == 0)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 511, 512, 513, 1025])
def test_hits_and_misses_keep_their_places(path: Path, count: int) -> None:
    with VectorCache(path) as cache:
        present = [number for number in range(count) if number % 3]
        if present:
            store(cache, *present)
        assert kept(cache, *range(count)) == present
        assert cache.get(names(*range(count)), width=WIDTH).rows.shape == (count, WIDTH)


def test_repeated_keys_in_get(path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, 1, 2)
        assert kept(cache, 2, 9, 2, 1, 9, 1, 2) == [2, 2, 1, 1, 2]
        assert (cache.stats().hits, cache.stats().misses) == (5, 2)


def test_repeated_keys_in_put_the_last_counts(path: Path) -> None:
    key = names(1)[0]
    with VectorCache(path) as cache:
        cache.put([key, key], [[1.0], [2.0]], tokens=[1, 2], truncated=[False, True])
        hits = cache.get([key], width=1)
        assert (hits.rows[0, 0], hits.tokens[0], hits.truncated[0], len(cache)) == (2.0, 2, True, 1)


@pytest.mark.parametrize("width", [1, 2, 5000])
def test_put_again_replaces(path: Path, width: int) -> None:
    key = names(1)[0]
    with VectorCache(path) as cache:
        store(cache, 1, 2)
        cache.put([key], np.full((1, width), 9.0), tokens=[5], truncated=[False])
        np.testing.assert_array_equal(cache.get([key], width=width).rows, np.full((1, width), 9.0))
        assert kept(cache, 2) == [2]
        assert len(cache) == 2


def test_put_takes_float64_lists_and_strided_rows(path: Path) -> None:
    rows = np.arange(40, dtype=np.float64).reshape(4, 10)[:, ::2]
    with VectorCache(path) as cache:
        cache.put(names(*range(4)), rows, tokens=(1, 2, 3, 4), truncated=[0, 1, 0, 1])
        hits = cache.get(names(*range(4)), width=5)
        np.testing.assert_array_equal(hits.rows, rows.astype(np.float32))
        assert hits.truncated.tolist() == [False, True, False, True]


def test_empty_put_and_get(path: Path) -> None:
    with VectorCache(path) as cache:
        cache.put([], np.empty((0, 4)), tokens=[], truncated=[])
        assert cache.get([], width=4).rows.shape == (0, 4)
        assert len(cache) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused(path: Path, bad: float) -> None:
    rows = np.ones((3, 4))
    rows[1, 2] = bad
    with VectorCache(path) as cache:
        with pytest.raises(InvalidRequestError, match=r"rows\[1\]"):
            cache.put(names(0, 1, 2), rows, tokens=[1] * 3, truncated=[False] * 3)
        assert len(cache) == 0


@pytest.mark.parametrize(
    ("keys", "rows", "tokens", "truncated", "says"),
    [
        (names(1), np.ones((2, 4)), [1, 1], [False] * 2, "1 keys"),
        (names(1, 2), np.ones((2, 4)), [1], [False], "tokens"),
        (names(1), np.ones(4), [1], [False], "shape|fit together"),
        ([b"short"], np.ones((1, 4)), [1], [False], r"keys\[0\]"),
        (["x" * 32], np.ones((1, 4)), [1], [False], r"keys\[0\]"),
        (names(1), np.ones((1, 4)), [-1], [False], "tokens=-1"),
        (names(1), np.ones((1, 4)), [2**31], [False], "tokens="),
    ],
)
def test_what_does_not_fit_is_refused(
    path: Path, keys: Any, rows: Any, tokens: Any, truncated: Any, says: str
) -> None:
    with VectorCache(path) as cache, pytest.raises(ValueError, match=says):
        cache.put(keys, rows, tokens=tokens, truncated=truncated)


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1, 2 * WIDTH])
def test_another_width_is_an_error(path: Path, width: int) -> None:
    with VectorCache(path) as cache:
        store(cache, 1, 2)
        with pytest.raises(CacheError, match=f"{WIDTH * 4} bytes.*width={width}"):
            cache.get(names(1, 2), width=width)
        assert kept(cache, 1, 2) == [1, 2]


# The file


def test_file_is_private_and_holds_no_text(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "cache.db"
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
    assert int.from_bytes(header[68:72], "big") == rowfile.APPLICATION_ID
    assert int.from_bytes(header[60:64], "big") == len(rowfile.MIGRATIONS)


def test_an_empty_file_is_taken_and_made_private(path: Path) -> None:
    path.touch(mode=0o644)
    with VectorCache(path) as cache:
        store(cache, 1)
        assert kept(cache, 1) == [1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_permissions_given_by_the_owner_stay(path: Path) -> None:
    VectorCache(path).close()
    path.chmod(0o660)
    VectorCache(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


@pytest.mark.parametrize("name", ["with space", "100%", "what?#x", "ümlaut"])
def test_any_name_will_do(tmp_path: Path, name: str) -> None:
    with VectorCache(str(tmp_path / name)) as cache:
        store(cache, 1)
    assert (tmp_path / name).is_file()
    with VectorCache(tmp_path / name) as cache:
        assert kept(cache, 1) == [1]


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


def test_a_folder_is_refused(tmp_path: Path) -> None:
    before = tmp_path.stat().st_mode
    with pytest.raises(CacheError, match="not a file"):
        VectorCache(tmp_path)
    assert tmp_path.stat().st_mode == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"cannot be opened.*choose another path"):
        VectorCache(tmp_path / "file" / "cache.db")


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


def test_an_older_schema_is_brought_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with VectorCache(path) as cache:
        store(cache, 1, 2, 3)
    monkeypatch.setattr(
        rowfile, "MIGRATIONS", (*rowfile.MIGRATIONS, ("CREATE TABLE later (id INTEGER)", "INSERT INTO later VALUES (7)"))
    )
    for _ in range(2):  # the second time there is nothing to do
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
        patch.setattr(rowfile, "MIGRATIONS", (*rowfile.MIGRATIONS, ("CREATE TABLE later (id INTEGER)", "NONSENSE")))
        with pytest.raises(CacheError):
            VectorCache(path)
    with VectorCache(path) as cache:
        assert kept(cache, 1) == [1]


@pytest.mark.parametrize("left", [1, 99, 100, 4095, 4096, 4097, 0.25, 0.5, 0.9, -4096, -1])
def test_a_truncated_file_is_an_error(path: Path, left: float) -> None:
    with VectorCache(path) as cache:
        store(cache, *range(600))
    size = path.stat().st_size
    os.truncate(path, int(size * left) if 0 < left < 1 else int(left % size))
    with pytest.raises(CacheError, match="delete it") as caught:
        VectorCache(path)
    assert str(path) in str(caught.value)


def cells(data: bytes) -> list[int]:
    """Where each vector lies in the file."""
    return [data.find(vector(number).tobytes()) for number in range(64)]


@pytest.mark.parametrize("part", ["vector", "metadata"])
def test_a_damaged_row_is_an_error(path: Path, part: str) -> None:
    with VectorCache(path) as cache:
        store(cache, *range(64))
    data = bytearray(path.read_bytes())
    place = cells(bytes(data))[10]
    assert place > 0
    before = path.stat().st_size
    if part == "vector":
        data[place + 17] ^= 1  # one bit of the mantissa's middle
    else:
        # meta (10 << 1: one byte) lies before the checksum (6 bytes or less) and the vector
        meta = data.rfind(bytes([10 << 1 | 0]), place - 10, place)
        assert meta > 0
        data[meta] ^= 2  # another number of tokens
    path.write_bytes(data)
    assert path.stat().st_size == before
    with VectorCache(path) as cache:
        with pytest.raises(CacheError, match=r"damaged.*delete it") as caught:
            cache.get(names(*range(64)), width=WIDTH)
        assert str(path) in str(caught.value)
        assert kept(cache, *range(20, 30)) == list(range(20, 30))  # the others are as good as ever


def test_swapped_rows_are_an_error(path: Path) -> None:
    """Sound vectors under the wrong keys: only a checksum that covers the key can tell."""
    with VectorCache(path) as cache:
        store(cache, 1, 2)
    connection = sqlite3.connect(path, isolation_level=None)
    rows = dict(connection.execute("SELECT id, key FROM rows"))
    first, second = rows
    connection.execute("UPDATE rows SET key = x'00' WHERE id = ?", (first,))
    connection.execute("UPDATE rows SET key = ? WHERE id = ?", (rows[first], second))
    connection.execute("UPDATE rows SET key = ? WHERE id = ?", (rows[second], first))
    connection.close()
    with VectorCache(path) as cache, pytest.raises(CacheError, match="damaged"):
        cache.get(names(1, 2), width=WIDTH)


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
    ],
)
def test_columns_of_another_type_are_an_error(path: Path, change: str) -> None:
    with VectorCache(path) as cache:
        store(cache, 1)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA writable_schema=ON")
    connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
    connection.close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"UPDATE rows SET {change}")
    connection.close()
    with VectorCache(path) as cache, pytest.raises(CacheError, match="damaged"):
        cache.get(names(1), width=WIDTH)


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_never_gives_a_wrong_vector(tmp_path: Path, seed: int) -> None:
    """Bytes overwritten anywhere: rows come back right, or not, or the file is called damaged. Nothing else."""
    chance = random.Random(seed)
    path = tmp_path / "cache.db"
    with VectorCache(path) as cache:
        store(cache, *range(200))
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 3, 30])):
        start = chance.randrange(len(data))
        for place in range(start, min(len(data), start + chance.choice([1, 8, 512, 4096]))):
            data[place] = chance.randrange(256)
    path.write_bytes(data)
    try:
        with VectorCache(path, max_bytes=1 << 20) as cache:
            for number in range(200):
                try:
                    kept(cache, number)
                except CacheError:
                    continue
            store(cache, *range(100, 300))
            kept(cache, *range(300))
            cache.stats()
            cache.clear()
    except CacheError as error:
        assert str(path) in str(error)


# Sharing


def test_many_threads_share_one_object(path: Path) -> None:
    with VectorCache(path) as cache:

        def work(thread: int) -> None:
            chance = random.Random(thread)
            for _ in range(15):
                numbers = [chance.randrange(300) for _ in range(20)]
                store(cache, *numbers)
                assert kept(cache, *numbers) == numbers
                kept(cache, *(chance.randrange(300) for _ in range(50)))

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        assert cache.stats().misses + cache.stats().hits == 16 * 15 * 70
        present = len(cache)
        assert len(kept(cache, *range(300))) == present


def test_threads_that_end_leave_no_connection(path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, 1)
        for _ in range(20):
            thread = threading.Thread(target=kept, args=(cache, 1))
            thread.start()
            thread.join()
        assert len(cache._file._file._idle) == 1


def test_processes_share_a_file(path: Path) -> None:
    """Four fresh interpreters create, write and read one file at once; then everything is there."""
    body = """
        process = int(sys.argv[2])
        with VectorCache(sys.argv[1]) as cache:
            for step in range(25):
                mine = [process * 1000 + step * 8 + place for place in range(8)]
                store(cache, *mine, *range(5000, 5010))
                assert kept(cache, *mine) == mine
                kept(cache, *range(0, 4000, 7))
        print(len(mine))
    """
    processes = [script(body, path, number) for number in range(4)]
    assert [finish(process).strip() for process in processes] == ["8"] * 4
    expected = [process * 1000 + number for process in range(4) for number in range(200)]
    with VectorCache(path) as cache:
        assert kept(cache, *expected, *range(5000, 5010)) == [*expected, *range(5000, 5010)]
        assert len(cache) == 810


def test_processes_share_a_limit(path: Path) -> None:
    body = """
        process = int(sys.argv[2])
        with VectorCache(sys.argv[1], max_bytes=300_000) as cache:
            for step in range(20):
                mine = [process * 1000 + step * 16 + place for place in range(16)]
                store(cache, *mine, width=384)
                kept(cache, *range(0, 3000, 11), width=384)
            assert cache.stats().evicted > 0
            print(cache.stats().bytes)
    """
    processes = [script(body, path, number) for number in range(3)]
    assert all(int(finish(process)) <= 300_000 for process in processes)
    with VectorCache(path) as cache:
        assert 30 < len(kept(cache, *range(3000), width=384)) == len(cache)


def test_writes_are_seen_by_another_object_at_once(path: Path) -> None:
    with VectorCache(path) as one, VectorCache(path) as other:
        assert kept(other, 1) == []
        store(one, 1)
        assert kept(other, 1) == [1]
        other.clear()
        assert kept(one, 1) == []


def test_a_killed_writer_loses_at_most_what_it_had_not_committed(path: Path) -> None:
    body = """
        cache = VectorCache(sys.argv[1])
        for group in range(10_000):
            store(cache, *range(group * 64, group * 64 + 64))
            print(group, flush=True)
    """
    process = script(body, path)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 12:
            break
    process.kill()
    rest, _ = process.communicate(timeout=60)
    last = max([12, *(int(line) for line in rest.split() if line.isdigit())])
    with VectorCache(path) as cache:
        committed = list(range((last + 1) * 64))
        assert kept(cache, *committed) == committed
        beyond = list(range((last + 1) * 64, (last + 2) * 64))
        assert kept(cache, *beyond) in ([], beyond)
        assert len(cache) in (len(committed), len(committed) + 64)
        store(cache, 999_999)  # and the file goes on
        assert kept(cache, 999_999) == [999_999]


def test_a_transaction_cut_in_the_middle_leaves_nothing(path: Path) -> None:
    """The process dies after some rows of a group were handed to sqlite."""
    body = """
        import signal
        import millpond.rowfile as rowfile
        cache = VectorCache(sys.argv[1])
        store(cache, *range(64))
        count, original = 0, rowfile.checksum
        def die(*row):
            global count
            count += 1
            if count == 40:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*row)
        rowfile.checksum = die
        store(cache, *range(64, 128))
    """
    process = script(body, path)
    process.communicate(timeout=60)
    assert process.returncode == -9
    with VectorCache(path) as cache:
        assert kept(cache, *range(128)) == list(range(64))


def test_a_failed_put_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with VectorCache(path) as cache:
        store(cache, 1)
        original = rowfile.checksum
        calls = iter(range(3))

        def stop(*row: Any) -> int:
            next(calls)  # raises the fourth time
            return original(*row)

        with monkeypatch.context() as patch:
            patch.setattr(rowfile, "checksum", stop)
            with pytest.raises((RuntimeError, StopIteration, sqlite3.Error)):
                store(cache, *range(2, 9))
        assert kept(cache, *range(9)) == [1]
        store(cache, 2)
        assert kept(cache, 1, 2) == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_a_fork_the_object_raises_and_the_file_opens_anew(path: Path) -> None:
    body = """
        cache = VectorCache(sys.argv[1], max_bytes=1 << 20)
        store(cache, 1)
        assert kept(cache, 1) == [1]
        child = os.fork()
        if child == 0:
            try:
                for call in (lambda: kept(cache, 1), lambda: store(cache, 2), cache.stats, cache.clear, cache.__len__):
                    try:
                        call()
                    except CacheError as error:
                        assert "does not survive a fork" in str(error) and "open it again" in str(error), error
                    else:
                        raise AssertionError("no error in the child")
                cache.close()
                with VectorCache(sys.argv[1]) as mine:
                    assert kept(mine, 1) == [1]
                    store(mine, *range(10, 300))
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        store(cache, *range(300, 400))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        everything = [1, *range(10, 400)]
        assert kept(cache, *everything) == everything
        cache.close()
    """
    finish(script(body, path))
    with VectorCache(path) as cache:
        assert len(kept(cache, *range(400))) == 391


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_amid_other_threads_work(path: Path) -> None:
    """Children made while threads read and write open the file soundly, and the threads go on."""
    body = """
        import threading
        cache = VectorCache(sys.argv[1])
        store(cache, *range(50))
        stop = threading.Event()
        failures = []
        def work(thread):
            step = 0
            try:
                while not stop.is_set():
                    store(cache, 1000 * thread + step % 500)
                    assert kept(cache, *range(50)) == list(range(50))
                    step += 1
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
        for thread in threads: thread.start()
        for number in range(10):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    with VectorCache(sys.argv[1]) as mine:
                        store(mine, 90_000 + number)
                        code = 0 if kept(mine, *range(50)) == list(range(50)) else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stop.set()
        for thread in threads: thread.join()
        assert not failures, failures
        assert kept(cache, *range(90_000, 90_010)) == list(range(90_000, 90_010))
        cache.close()
    """
    finish(script(body, path))


def test_a_locked_file_is_a_clear_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlitefile.SqliteFile, "busy_timeout", 0.05)
    with VectorCache(path) as cache:
        store(cache, 1)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CacheError, match="locked by another process") as caught:
            store(cache, 2)
        assert str(path) in str(caught.value)
        assert kept(cache, 1, 2) == [1]  # readers go on
        other.execute("ROLLBACK")
        store(cache, 2)
        assert kept(cache, 1, 2) == [1, 2]
        other.close()


def test_a_waiting_writer_gets_its_turn(path: Path) -> None:
    with VectorCache(path) as cache:
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        thread = threading.Thread(target=store, args=(cache, 1))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()  # it waits
        other.execute("ROLLBACK")
        thread.join(20)
        assert kept(cache, 1) == [1]
        other.close()


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit on this system")
def test_a_full_disk_is_a_clear_error(path: Path) -> None:
    """The system refuses to let any file grow further; what was committed stays readable."""
    body = """
        import resource
        cache = VectorCache(sys.argv[1])
        store(cache, *range(100))
        size = max(os.stat(sys.argv[1] + end).st_size for end in ("", "-wal"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50_000, resource.RLIM_INFINITY))
        try:
            for number in range(1000, 9000, 100):
                store(cache, *range(number, number + 100))
        except CacheError as error:
            assert sys.argv[1] in str(error), error
            assert "space" in str(error) and "choose another path" in str(error), error
            print("refused")
        assert kept(cache, *range(100)) == list(range(100))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        store(cache, 5)
        assert kept(cache, *range(100)) == list(range(100))
        cache.close()
    """
    assert finish(script(body, path)).strip() == "refused"
    with VectorCache(path) as cache:
        assert kept(cache, *range(100)) == list(range(100))


def test_sqlites_own_full_is_named(path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, 1)
        with cache._file._file.connection() as connection:
            connection.execute("PRAGMA max_page_count=20")
        with pytest.raises(CacheError, match=r"disk is full.*max_bytes"):
            store(cache, *range(2000))
        assert kept(cache, *range(10)) == [1]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_cannot_be_written_is_named(path: Path) -> None:
    VectorCache(path).close()
    path.chmod(0o400)
    with pytest.raises(CacheError, match="writable"), VectorCache(path) as cache:
        store(cache, 1)


# Size


def test_the_limit_holds_and_the_newest_stay(path: Path) -> None:
    limit = 400_000
    with VectorCache(path, max_bytes=limit) as cache:
        for start in range(0, 2000, 50):
            store(cache, *range(start, start + 50), width=384)
            assert cache.stats().bytes <= limit
        present = kept(cache, *range(2000), width=384)
        assert len(cache) == len(present) == 2000 - cache.stats().evicted
        assert present == list(range(present[0], 2000))  # the oldest went
        assert cache.stats().bytes > limit * 0.75
    assert path.stat().st_size < limit * 1.25


def test_used_vectors_outlive_unused_ones(path: Path) -> None:
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, *range(100), width=384)
        for start in range(1000, 2000, 20):
            assert kept(cache, *range(0, 100, 10), width=384) == list(range(0, 100, 10))
            store(cache, *range(start, start + 20), width=384)
        assert kept(cache, *range(100), width=384) == list(range(0, 100, 10))


def test_without_use_the_same_vectors_go(path: Path) -> None:
    """The control of the test above."""
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, *range(100), width=384)
        for start in range(1000, 2000, 20):
            store(cache, *range(start, start + 20), width=384)
        assert kept(cache, *range(100), width=384) == []


def test_storing_again_is_a_use(path: Path) -> None:
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, *range(100), width=384)
        for start in range(1000, 2000, 20):
            store(cache, *range(start, start + 20), 7, width=384)
        assert kept(cache, *range(100), width=384) == [7]


def test_uses_are_remembered_across_openings(path: Path) -> None:
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, *range(60), width=384)
        store(cache, *range(100, 160), width=384)
    with VectorCache(path, max_bytes=400_000) as cache:
        kept(cache, *range(60), width=384)  # written down by close
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, *range(200, 260), width=384)
        present = kept(cache, *range(160), width=384)
        assert present[:60] == list(range(60))
        assert len(present) < 120


def test_many_uses_are_written_down_on_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowfile, "_USES_HELD", 8)
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, *range(60), width=384)
        store(cache, *range(100, 160), width=384)
        kept(cache, *range(60), width=384)
        with VectorCache(path, max_bytes=400_000) as other:  # which sees them before any put or close
            store(other, *range(200, 260), width=384)
        assert kept(cache, *range(60), width=384) == list(range(60))
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        assert kept(cache, *range(60), width=384) == list(range(60))  # a reader neither waits nor fails for them
        blocker.execute("ROLLBACK")
        blocker.close()


def test_one_put_larger_than_the_limit_keeps_its_last(path: Path) -> None:
    limit = 100_000
    with VectorCache(path, max_bytes=limit) as cache:
        store(cache, *range(1000), width=384)
        present = kept(cache, *range(1000), width=384)
        assert present == list(range(present[0], 1000))
        assert len(present) > 10
        stats = cache.stats()
        assert stats.bytes <= limit
        assert (stats.written, stats.evicted) == (1000, 1000 - len(present))
    assert path.stat().st_size < 2 * limit


def test_a_vector_larger_than_the_limit_is_not_kept(path: Path) -> None:
    with VectorCache(path, max_bytes=1 << 15) as cache:
        store(cache, 1)
        key = names(1)
        cache.put(key, np.ones((1, 20_000)), tokens=[1], truncated=[False])
        assert not cache.get(key, width=20_000).found.any()  # nor its old, now wrong, vector


def test_widths_may_mix_under_a_limit(path: Path) -> None:
    chance = random.Random(0)
    limit = 600_000
    width = {number: chance.choice([16, 384, 1024, 3000]) for number in range(1500)}
    with VectorCache(path, max_bytes=limit) as cache:
        for start in range(0, 1500, 30):
            for number in range(start, start + 30):
                store(cache, number, width=width[number])
            for number in chance.sample(range(start + 30), 20):
                kept(cache, number, width=width[number])
            assert cache.stats().bytes <= limit
        assert sum(len(kept(cache, number, width=width[number])) for number in range(1500)) == len(cache) > 20
    assert path.stat().st_size < 2 * limit


def test_a_smaller_limit_is_reached_by_the_next_put(path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, *range(300), width=384)
        assert cache.stats().bytes > 400_000
    with VectorCache(path, max_bytes=200_000) as cache:
        store(cache, 1000, width=384)
        assert cache.stats().bytes <= 200_000
        assert kept(cache, 1000, width=384) == [1000]
        assert kept(cache, *range(300), width=384)


@pytest.mark.parametrize("limit", [-1, 0, 1000])
def test_a_limit_too_small_is_refused(path: Path, limit: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"max_bytes={limit}.*32768"):
        VectorCache(path, max_bytes=limit)
    assert not path.exists()


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


# The object


def test_stats(path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, 1, 2, 3)
        kept(cache, 1, 2, 9)
        stats = cache.stats()
        assert stats == CacheStats(rows=3, bytes=stats.bytes, hits=2, misses=1, written=3, evicted=0)
        assert stats.bytes % 4096 == 0
        assert 4096 < stats.bytes < 100_000
        with pytest.raises(FrozenInstanceError):
            stats.rows = 4  # type: ignore[misc]
    with VectorCache(path) as cache:
        assert cache.stats() == CacheStats(rows=3, bytes=stats.bytes, hits=0, misses=0, written=0, evicted=0)


def test_closed_is_an_error_and_closing_twice_is_not(path: Path) -> None:
    cache = VectorCache(path)
    store(cache, 1)
    cache.close()
    cache.close()
    for call in (lambda: kept(cache, 1), lambda: store(cache, 2), cache.stats, cache.clear, cache.__len__):
        with pytest.raises(CacheError, match="closed"):
            call()
    assert str(path) in repr(cache)


def test_close_amid_work_of_other_threads(path: Path) -> None:
    """Each call ends well or says closed; nothing stays open."""
    cache = VectorCache(path)
    store(cache, *range(100))
    started = threading.Barrier(5)

    def work() -> None:
        started.wait()
        try:
            while True:
                assert kept(cache, *range(100)) == list(range(100))
        except CacheError as error:
            assert "closed" in str(error)

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(work) for _ in range(4)]
        started.wait()
        cache.close()
        for each in running:
            each.result(timeout=30)
    assert [file.name for file in path.parent.iterdir()] == ["cache.db"]  # the last connection removed the log


def test_a_file_copied_elsewhere_is_the_same_cache(path: Path, tmp_path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, *range(50))
    shutil.copy(path, tmp_path / "copy.db")
    with VectorCache(tmp_path / "copy.db") as cache:
        assert kept(cache, *range(50)) == list(range(50))


GOLDEN = "0"
