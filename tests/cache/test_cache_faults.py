"""A disk that fails under an engine: the vectors are right, and the cache counts what it could not store."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cached import finish, kept, script, store
from tests.tiny import write_checkpoint

from millpond import VectorCache
from millpond.cache import sqlitefile
from millpond.errors import CacheError

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


def test_vectors_that_cannot_be_stored_are_counted(tmp_path: Path) -> None:
    with VectorCache(tmp_path / "cache.db") as cache:
        store(cache, 1)
        assert (cache.unwritten, cache.write_error) == (0, None)
        with cache._file._file.connection() as connection:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count={pages}")
        for expected in (2000, 4000):
            with pytest.raises(CacheError, match="disk is full") as caught:
                store(cache, *range(2000))
            assert cache.unwritten == cache.stats().unwritten == expected
            assert cache.write_error == cache.stats().write_error == str(caught.value)
            with cache._file._file.connection() as connection:
                connection.execute(f"PRAGMA max_page_count={pages}")
        with cache._file._file.connection() as connection:
            connection.execute("PRAGMA max_page_count=100000")
        store(cache, *range(2000))
        assert cache.unwritten == 4000
        assert cache.write_error == str(caught.value)
        assert kept(cache, *range(2000)) == list(range(2000))


def test_a_lock_is_waited_for_once_and_then_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 30 seconds for every transaction, an engine would stand still while another process holds the lock."""
    monkeypatch.setattr(sqlitefile.SqliteFile, "busy_timeout", 0.3)
    monkeypatch.setattr(sqlitefile.SqliteFile, "locked_timeout", 0.01)
    waits: list[int] = []
    with VectorCache(tmp_path / "cache.db") as cache, VectorCache(tmp_path / "cache.db") as other:
        store(cache, 1)
        with other._file._file.transaction():
            for number in range(3):
                with pytest.raises(CacheError, match="locked by another process"):
                    store(cache, number)
                with cache._file._file.connection() as connection:
                    waits += connection.execute("PRAGMA busy_timeout").fetchone()
        store(cache, 5)
        with cache._file._file.connection() as connection:
            waits += connection.execute("PRAGMA busy_timeout").fetchone()
        assert waits == [10, 10, 10, 300]
        assert kept(cache, 1, 5) == [1, 5]
        assert cache.unwritten == 3
