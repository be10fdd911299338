"""A cache shared by threads and processes, through forks, kills and locks, on a disk that fails."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cached import finish, kept, script, store
from tests.tiny import write_checkpoint

from millpond import VectorCache
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


# --- Disks that fail --------------------------------------------------------------------------------------------------


COMPILER = shutil.which("cc")
needs_linux = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"), reason="faults are injected by a C library on Linux"
)

# Embeds with a healthy disk, with a faulty one and with a healthy one again; prints what each pass did.
_EMBED = """
    import json, logging
    import numpy as np
    from millpond import Engine; from millpond.cache import sqlitefile
    sqlitefile._PRAGMAS += ("wal_autocheckpoint=20",)  # of 4 KiB, so that there are checkpoints
    model, path, control, faults = sys.argv[1:5]
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logging.getLogger("millpond").addHandler(handler)
    logging.getLogger("millpond").propagate = False
    plain = Engine(model, dtype="float32", device="cpu")
    cache = VectorCache(path)
    engine = Engine(model, dtype="float32", device="cpu", cache=cache)
    passes = {}
    for name in ("healthy", "faulty", "healthy again"):
        if name == "faulty":
            open(control, "w").write(faults)
        elif os.path.exists(control):
            os.unlink(control)
        texts = [f"{name} {number}" for number in range(900)]
        for start in range(0, 900, 300):
            output = engine.embed(texts[start:start + 300])
            assert not output.cached.any()
            assert np.allclose(output.embeddings, plain.embed(texts[start:start + 300]).embeddings, atol=1e-5)
        passes[name] = [cache.unwritten, cache.write_error]
    engine.close()
    stats = cache.stats()
    cache.close()
    print(json.dumps({"passes": passes, "records": records, "unwritten": stats.unwritten, "error": stats.write_error}))
"""


@pytest.fixture(scope="session")
def faulty_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("faults") / "faulty_disk.so"
    source = Path(__file__).with_name("faulty_disk.c")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults") / "bert", "bert")


@needs_linux
@pytest.mark.contract
@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        pytest.param(f"write -wal {errno.ENOSPC}", "space", id="disk full at the commit"),
        pytest.param(
            f"write -wal {errno.EIO}", "check the disk", id="input/output error at the commit", marks=pytest.mark.slow
        ),
        pytest.param(f"write -wal {errno.EDQUOT}", "check the disk", id="quota", marks=pytest.mark.slow),
        pytest.param(f"write cache.db {errno.ENOSPC}", None, id="disk full at the checkpoint", marks=pytest.mark.slow),
        pytest.param(f"sync -wal {errno.EIO}", None, id="fsync of the log fails", marks=pytest.mark.slow),
        pytest.param(f"sync cache.db {errno.EIO}", None, id="fsync of the file fails", marks=pytest.mark.slow),
        pytest.param(
            f"truncate -wal {errno.EIO} truncate cache.db {errno.EIO}",
            None,
            id="truncation fails",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"write cache.db {errno.ENOSPC} write -wal {errno.ENOSPC} write -shm {errno.ENOSPC}",
            "space",
            id="disk full everywhere",
        ),
    ],
)
def test_an_engine_goes_on_when_its_cache_cannot_be_written(
    model: Path, tmp_path: Path, faulty_disk: Path, faults: str, reason: str | None
) -> None:
    """A reason of None: a checkpoint that fails leaves the rows in the log; a commit fails when that starts anew."""
    path, control = tmp_path / "cache.db", tmp_path / "control"
    environment = {**os.environ, "LD_PRELOAD": str(faulty_disk), "FAULTY_DISK": str(control)}
    result = json.loads(finish(script(_EMBED, model, path, control, faults, env=environment)))
    assert Path(f"{control}.hits").exists(), "no call failed"
    passes, errors = result["passes"], [text for level, text in result["records"] if level == "ERROR"]
    assert passes["healthy"] == [0, None]
    lost, message = passes["faulty"]
    assert passes["healthy again"] == [lost, message], "a disk that can be written again is used again"
    assert (result["unwritten"], result["error"]) == (lost, message)
    assert lost == 900 or reason is None
    assert (message is not None) == (lost > 0) == bool(errors)
    assert len(errors) <= 2, "once for each kind of error, not for each batch"
    if message is not None:
        assert (reason or "check the disk") in message
        assert str(path) in message
    with VectorCache(path) as cache:
        assert len(cache) == 2700 - lost
        with cache._file._file.connection() as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_lock_is_waited_for_once_and_then_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 30 seconds for every transaction, an engine would stand still while another process holds the lock."""
    monkeypatch.setattr("millpond.cache.sqlitefile.SqliteFile.busy_timeout", 0.3)
    monkeypatch.setattr("millpond.cache.sqlitefile.SqliteFile.locked_timeout", 0.01)
    waits: list[int] = []
    with VectorCache(tmp_path / "cache.db") as cache, VectorCache(tmp_path / "cache.db") as other:
        store(cache, 1)
        with other._file._file.transaction():
            for number in range(3):
                with pytest.raises(CacheError, match="locked by another process") as caught:
                    store(cache, number)
                assert str(cache.path) in str(caught.value) and kept(cache, 1) == [1]  # readers are not blocked
                with cache._file._file.connection() as connection:
                    waits += connection.execute("PRAGMA busy_timeout").fetchone()
        store(cache, 5)
        with cache._file._file.connection() as connection:
            waits += connection.execute("PRAGMA busy_timeout").fetchone()
        assert waits == [10, 10, 10, 300]
        assert kept(cache, 1, 5) == [1, 5]
        assert cache.unwritten == 3
