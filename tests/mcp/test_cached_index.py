"""Old indexes in the cache folder: removed when nobody uses them, and never while somebody does."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.mcp.words_engine import WordsEngine

from millpond.mcp.folder import cached_index
from millpond.mcp.folder.cached_index import CachedIndex, remove_unused
from millpond.mcp.folder.index import FolderIndex
from millpond.mcp.folder.store import UnitStore

DAY = 86_400


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "notes.txt").write_text("Flour is bought from the mill.\n")
    return root


def indexed(root: Path, cache: Path, name: str = "a") -> Path:
    """An index that a process has made and left."""
    path = cache / f"{name}.db"
    held = CachedIndex(path, root)
    engine = WordsEngine()
    index = FolderIndex(root, UnitStore(path), lambda: engine)  # type: ignore[arg-type, return-value]
    index.update()
    index.store.close()
    held.release()
    return path


def age(path: Path, days: float) -> None:
    for each in path.parent.glob(f"{path.stem}.*"):
        os.utime(each, (then := time.time() - days * DAY, then))


@pytest.mark.parametrize(
    ("days", "is_there", "kept"), [(89, True, True), (91, True, False), (6, False, True), (8, False, False)]
)
def test_an_index_goes_when_its_time_has_come(root: Path, tmp_path: Path, days: int, is_there: bool, kept: bool):
    cache = tmp_path / "cache"
    path, other = indexed(root, cache), indexed(root, cache, "b")
    (cache / "foreign.txt").write_text("not ours")
    age(path, days)
    if not is_there:
        root.rename(root.with_name("elsewhere"))
    remove_unused(cache)
    assert path.exists() is kept and bool(list(cache.glob("a.*"))) is kept
    assert other.exists() and (cache / "foreign.txt").exists()


def test_every_search_is_a_use(root: Path, tmp_path: Path):
    path = tmp_path / "cache" / "a.db"
    held = CachedIndex(path, root)
    age(path, 91)
    held.touch()
    assert path.with_suffix(".use").stat().st_mtime == pytest.approx(time.time(), abs=60)
    age(path, 91)
    held.release()  # the end of a use, too
    remove_unused(path.parent)
    assert path.with_suffix(".use").exists()


def test_without_a_mark_the_time_of_the_database_counts(root: Path, tmp_path: Path):
    path = indexed(root, tmp_path / "cache")
    path.with_suffix(".use").unlink()
    age(path, 89)
    remove_unused(path.parent)
    assert path.exists() and not path.with_suffix(".use").exists()
    age(path, 91)
    remove_unused(path.parent)
    assert not list(path.parent.glob("a.*"))


def test_a_removal_that_was_killed_is_completed(root: Path, tmp_path: Path):
    path = indexed(root, tmp_path / "cache")
    path.unlink()
    age(path, 91)
    remove_unused(path.parent)
    assert not list(path.parent.glob("a.*"))


USER = """
import sys
from pathlib import Path
from millpond.mcp.folder.cached_index import CachedIndex
held = CachedIndex(Path(sys.argv[1]), Path(sys.argv[2]))
print("used", flush=True)
sys.stdin.read()
"""


def test_an_index_that_a_process_uses_is_kept_until_the_process_is_dead(root: Path, tmp_path: Path):
    path = indexed(root, tmp_path / "cache")
    user = subprocess.Popen(
        [sys.executable, "-c", USER, str(path), str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert user.stdout is not None and user.stdout.readline() == "used\n"
    age(path, 400)
    remove_unused(path.parent)
    assert path.exists()
    user.send_signal(signal.SIGKILL)
    user.communicate()
    remove_unused(path.parent)
    assert not list(path.parent.glob("a.*"))


def test_who_starts_during_a_removal_waits_and_has_an_index_of_its_own(root: Path, tmp_path: Path):
    path = indexed(root, tmp_path / "cache")
    mark = path.with_suffix(".use")
    remover = os.open(mark, os.O_RDWR)
    fcntl.flock(remover, fcntl.LOCK_EX)
    started = threading.Event()
    made: list[CachedIndex] = []

    def start() -> None:
        started.set()
        made.append(CachedIndex(path, root))

    thread = threading.Thread(target=start)
    thread.start()
    started.wait()
    assert not made
    for each in (path, mark):
        each.unlink()
    os.close(remover)
    thread.join(30)
    assert made and mark.read_text() == str(root)
    age(path, 400)
    remove_unused(path.parent)
    assert mark.exists()  # held, though it is another file than that which was waited for
    made[0].release()


def test_an_index_that_is_used_again_at_the_last_moment_is_kept(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = indexed(root, tmp_path / "cache")
    age(path, 91)
    lock = fcntl.flock

    def used_before(descriptor: int, kind: int) -> None:
        if kind & fcntl.LOCK_EX:
            os.utime(path.with_suffix(".use"))
        lock(descriptor, kind)

    monkeypatch.setattr(cached_index.fcntl, "flock", used_before)
    remove_unused(path.parent)
    assert path.exists()


def test_what_cannot_be_removed_is_told(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path, second = indexed(root, tmp_path / "cache"), indexed(root, tmp_path / "cache", "b")
    age(path, 91)
    age(second, 91)
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    remove_unused(path.parent)
    assert path.exists() and not second.exists()
    assert f"the unused index {path} cannot be removed" in caplog.text
