"""A cache shared by threads and processes, through forks, kills, locks and full disks."""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.cached import finish, kept, script, store

from millpond import VectorCache
from millpond.cache import blob_store, sqlitefile
from millpond.errors import CacheError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


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


@pytest.mark.contract
def test_processes_share_a_file(path: Path) -> None:
    """Four fresh interpreters create, write and read one file at once; afterwards it holds everything."""
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


def test_writes_are_seen_by_another_object_at_once(path: Path) -> None:
    with VectorCache(path) as one, VectorCache(path) as other:
        assert kept(other, 1) == []
        store(one, 1)
        assert kept(other, 1) == [1]
        other.clear()
        assert kept(one, 1) == []


@pytest.mark.contract
def test_a_transaction_cut_in_the_middle_leaves_nothing(path: Path) -> None:
    """The process dies after sqlite got some rows of a group."""
    body = """
        import signal
        from millpond.cache import blob_store
        cache = VectorCache(sys.argv[1])
        store(cache, *range(64))
        count, original = 0, blob_store.checksum
        def die(*row):
            global count
            count += 1
            if count == 40:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*row)
        blob_store.checksum = die
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
        original = blob_store.checksum
        calls = iter(range(3))

        def stop(*row: Any) -> int:
            next(calls)  # raises the fourth time
            return original(*row)

        with monkeypatch.context() as patch:
            patch.setattr(blob_store, "checksum", stop)
            with pytest.raises((RuntimeError, StopIteration, sqlite3.Error)):
                store(cache, *range(2, 9))
        assert kept(cache, *range(9)) == [1]
        store(cache, 2)
        assert kept(cache, 1, 2) == [1, 2]


@pytest.mark.contract
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_a_fork_the_object_raises_and_the_file_can_be_opened_again(path: Path) -> None:
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


@pytest.mark.contract
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_parent_that_closes_takes_nothing_from_its_child(path: Path) -> None:
    """If the parent's connection were copied, the child would hold no lock, and the parent would remove its log."""
    body = """
        cache = VectorCache(sys.argv[1])
        store(cache, 1)
        to_parent, from_child = os.pipe()
        to_child, from_parent = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with VectorCache(sys.argv[1]) as mine:
                    store(mine, *range(10, 20))
                    os.write(from_child, b".")
                    os.read(to_child, 1)
                    store(mine, *range(20, 30))
                    code = 0
            finally:
                os._exit(code)
        os.read(to_parent, 1)
        assert kept(cache, *range(10, 20)) == list(range(10, 20))
        cache.close()
        os.write(from_parent, b".")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    finish(script(body, path))
    with VectorCache(path) as cache:
        assert kept(cache, 1, *range(10, 30)) == [1, *range(10, 30)]


def test_a_locked_file_is_a_clear_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlitefile.SqliteFile, "busy_timeout", 0.05)
    with VectorCache(path) as cache:
        store(cache, 1)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CacheError, match="locked by another process") as caught:
            store(cache, 2)
        assert str(path) in str(caught.value)
        assert kept(cache, 1, 2) == [1]  # readers are not blocked
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


@pytest.mark.contract
@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit on this system")
def test_a_full_disk_is_a_clear_error(path: Path) -> None:
    """The system lets no file grow further; committed rows stay readable."""
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


@pytest.mark.contract
@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no such permissions on this system")
def test_a_file_that_cannot_be_written_is_named() -> None:
    body = """
        import tempfile
        from pathlib import Path
        if os.geteuid() == 0:  # root may write everywhere
            os.seteuid(65534)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "cache.db")
            with VectorCache(path) as cache:
                store(cache, 1)
            for file, mode in ((path, 0o400), (path, 0), (path.parent, 0o500), (path.parent, 0)):
                before = file.stat().st_mode
                file.chmod(mode)
                try:
                    with VectorCache(path) as cache:
                        store(cache, 2)
                except CacheError as error:
                    assert str(path) in str(error) and "make it and its folder writable" in str(error), error
                    print("refused")
                file.chmod(before)
            with VectorCache(path) as cache:
                assert kept(cache, 1, 2) == [1]
    """
    assert finish(script(body)).split() == ["refused"] * 4


def test_close_closes_connections_in_use_when_they_are_returned(path: Path) -> None:
    cache = VectorCache(path)
    with cache._file._file.connection() as connection:
        cache.close()
        assert connection.execute("SELECT count(*) FROM rows").fetchone() == (0,)
    assert [file.name for file in path.parent.iterdir()] == ["cache.db"]  # the last connection removed the log
