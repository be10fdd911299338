"""An engine with a cache: killed, on a slow disk, and with a file that is damaged while it embeds."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.cached import finish, script
from tests.tiny import write_checkpoint

from millpond import Engine, VectorCache

PAGE = 4096
TEXTS = [f"text {number} of the mill" for number in range(600)]
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("damage") / "bert", "bert")


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Engine]:
    with Engine(model, dtype="float32", device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> npt.NDArray[np.float32]:
    return plain.embed(TEXTS).embeddings


@pytest.fixture(scope="module")
def filled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the vectors of all texts."""
    path = tmp_path_factory.mktemp("filled") / "cache.db"
    with Engine(model, dtype="float32", device="cpu", cache=path) as engine:
        engine.embed(TEXTS)
    return path


def overwrite(start: int, length: int, byte: int | None = 0) -> Damage:
    """Bytes at ``start`` (from the end, if negative) become ``byte``, or random ones."""

    def damage(path: Path) -> None:
        size = path.stat().st_size
        data = random.Random(1).randbytes(length) if byte is None else bytes([byte]) * length
        with path.open("r+b") as file:
            file.seek(start % size)
            file.write(data)

    return damage


def log(damage: Damage) -> Damage:
    """The damage, done to the write-ahead log."""
    return lambda path: damage(Path(f"{path}-wal"))


def truncate(share: float) -> Damage:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def scattered(path: Path) -> None:
    chance = random.Random(5)
    size = path.stat().st_size
    with path.open("r+b") as file:
        for _ in range(200):
            file.seek(chance.randrange(size))
            file.write(chance.randbytes(8))


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_text(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("no cache\n" * 999)
    other.replace(path)


def delete_with_log(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink()


def move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


def replace_by_another_cache(path: Path) -> None:
    other = path.with_name("other")
    VectorCache(other).close()
    other.replace(path)


MEANWHILE: dict[str, Damage] = {
    "header": overwrite(0, 100),
    "schema page": overwrite(0, PAGE, None),
    "data pages": overwrite(20 * PAGE, 20 * PAGE, None),
    "last pages": overwrite(-5 * PAGE, 5 * PAGE),
    "scattered": scattered,
    "truncated to a half": truncate(0.5),
    "truncated to nothing": truncate(0),
    "log noise": log(overwrite(32, 64 * PAGE, None)),
    "log deleted": lambda path: Path(f"{path}-wal").unlink(),
    "deleted": lambda path: path.unlink(),
    "deleted with its log": delete_with_log,
    "replaced by text": replace_by_text,
    "replaced by another cache": replace_by_another_cache,
    "replaced by a folder": replace_by_a_folder,
    "its folder moved away": move_folder,
}


FAST = ("schema page", "data pages", "deleted", "replaced by a folder")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MEANWHILE]
)
def test_a_run_ends_with_the_right_vectors_when_its_cache_is_damaged_meanwhile(
    model: Path,
    plain: Engine,
    expected: npt.NDArray[np.float32],
    filled: Path,
    tmp_path: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "folder" / "cache.db"
    path.parent.mkdir()
    shutil.copy(filled, path)
    fresh = [f"new {text}" for text in TEXTS]
    right = plain.embed(fresh).embeddings
    with Engine(model, dtype="float32", device="cpu", cache=path) as engine:
        assert engine.embed(TEXTS).cached.all()
        np.testing.assert_allclose(engine.embed(fresh[:300]).embeddings, right[:300], atol=1e-5)
        MEANWHILE[name](path)
        for _ in range(2):
            np.testing.assert_allclose(engine.embed(TEXTS).embeddings, expected, atol=1e-5)
            np.testing.assert_allclose(engine.embed(fresh).embeddings, right, atol=1e-5)
            for start in range(0, 600, 20):
                np.testing.assert_allclose(
                    engine.embed(TEXTS[start : start + 20]).embeddings, expected[start : start + 20], atol=1e-5
                )
        assert engine.cache is not None
        lost = engine.cache.unwritten
    assert len(warnings(caplog)) <= 4, "a line for each kind of error, not for each batch"
    if lost:
        assert any("cannot be cached" in line for line in warnings(caplog))
    if name.startswith(("deleted", "replaced by another")):
        assert any("deleted or replaced" in line for line in warnings(caplog))
        with VectorCache(path) as cache:
            assert len(cache) > 0, "the file that was made again is used"


# --- Commits: kill -9, slow disks, callbacks --------------------------------------------------------------------------


# Embeds texts for ever, several calls ahead. Each computed batch is a line of the log: its number of rows, written
# before anything else happens to them.
_EMBED = """
    from millpond import Engine, PoolingParams
    model, path, log, words, most, first = sys.argv[1], *sys.argv[2:4], *map(int, sys.argv[4:7])
    engine = Engine(model, dtype="float32", device="cpu", cache=path)
    log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    runner = engine._replicas.runner
    run = runner.run
    def counted(requests):
        results = run(requests)
        os.write(log, b"%d\\n" % len(results))
        return results
    runner.run = counted
    print(engine._dispatcher._committer.most_waiting, len(engine._dispatcher.workers), flush=True)
    calls = []
    for start in range(first, first + most, 512):
        texts = [f"{number} " + "stone " * (number % words) for number in range(start, start + 512)]
        calls.append(engine.submit("embed", texts, PoolingParams(normalize=False)))
        if len(calls) > 3:
            calls.pop(0).result()
    for call in calls:
        call.result()
    print("all", flush=True)
    engine.close()
"""


def counted(log: Path) -> list[int]:
    """Rows of each computed batch."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line) for line in lines]


def killed(model: Path, folder: Path, *, words: int, rows: int, first: int = 0) -> tuple[int, int]:
    """Kill a process after about ``rows`` computed rows; returns the rows it lost, and the stated bound."""
    path, log = folder / "cache.db", folder / f"computed-{first}"
    with VectorCache(path) as cache:
        before = len(cache)
    process = script(_EMBED, model, path, log, words, 1 << 20, first)
    assert process.stdout is not None
    waiting, threads = map(int, process.stdout.readline().split())
    while sum(counted(log)) < rows and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    batches = counted(log)
    with VectorCache(path) as cache:
        lost = sum(batches) - (len(cache) - before)
    return lost, waiting + threads * max(batches)


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.parametrize("words", [1, 60])
def test_a_killed_engine_loses_at_most_a_batch_for_each_thread_and_what_may_wait(
    model: Path, tmp_path: Path, words: int
) -> None:
    lost, bound = killed(model, tmp_path, words=words, rows=2500)
    assert 0 <= lost <= bound
    assert bound <= 64 + 4096 * 8


@pytest.mark.contract
def test_an_engine_that_ends_loses_nothing(model: Path, tmp_path: Path) -> None:
    """The control of the kills: the same process, left alone, commits every row it computes."""
    path, log = tmp_path / "cache.db", tmp_path / "computed"
    assert finish(script(_EMBED, model, path, log, 8, 4096, 0)).split()[-1] == "all"
    with VectorCache(path) as cache:
        assert sum(counted(log)) == len(cache) == 4096


class SlowCache(VectorCache):
    """A cache on a disk that stands still until it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Event()
        self.puts: list[int] = []

    def put(self, keys: Any, rows: Any, **columns: Any) -> None:
        self.puts.append(len(keys))
        assert self.go.wait(60)
        super().put(keys, rows, **columns)


@pytest.mark.contract
def test_batches_wait_for_a_slow_disk_instead_of_piling_up(model: Path, tmp_path: Path) -> None:
    ran: list[int] = []
    with SlowCache(tmp_path / "cache.db") as cache, Engine(model, dtype="float32", device="cpu", cache=cache) as engine:
        runner = engine._replicas.runner
        run = runner.run

        def counting(requests: Any) -> Any:
            ran.append(len(requests))
            return run(requests)

        runner.run = counting  # type: ignore[method-assign]
        texts = [f"text {number} " + "stone " * 40 for number in range(2000)]
        call = engine.submit("embed", texts)
        committer = engine._dispatcher._committer
        assert committer is not None
        until = time.monotonic() + 20
        while committer._uncommitted <= committer.most_waiting and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.3)  # time for more batches, if nothing held them back
        assert sum(ran) <= committer.most_waiting + len(engine._dispatcher.workers) * max(ran)
        assert not call.done()
        cache.go.set()
        assert call.result(60).embeddings.shape == (2000, 48)
        assert len(cache) == sum(ran) == 2000


@pytest.mark.contract
@pytest.mark.parametrize("blocking", [1, 40])
def test_a_callback_may_embed_with_the_cache_while_rows_are_committed(
    model: Path, tmp_path: Path, blocking: int
) -> None:
    """The committing thread runs callbacks: rows that a callback waits for must be committed by another, or by it."""
    inner: list[Any] = []
    with Engine(model, dtype="float32", device="cpu", cache=tmp_path / "cache.db", max_batch_tokens=128) as engine:
        done = threading.Event()

        def again(_: Any) -> None:
            inner.append(engine.embed([f"inner {number} of {blocking}" for number in range(blocking)]))
            done.set()

        calls = [engine.submit("embed", [f"outer {number} {call}" for number in range(50)]) for call in range(8)]
        calls[0].add_done_callback(again)
        for call in calls:
            call.result(60)
        assert done.wait(60)
        assert len(inner[0].embeddings) == blocking
        assert len(engine.cache or ()) == 400 + blocking


@pytest.mark.contract
def test_a_call_waits_for_all_of_its_rows_in_whatever_order_threads_deliver_them(model: Path, tmp_path: Path) -> None:
    """The thread with the last rows may reach the committer before one with earlier rows."""
    with SlowCache(tmp_path / "c.db") as cache, Engine(model, dtype="float32", device="cpu", cache=cache) as engine:
        committer = engine._dispatcher._committer
        assert committer is not None
        held: list[tuple[Any, ...]] = []
        commit = committer.commit
        committer.commit = lambda *delivery: held.append(delivery)  # type: ignore[method-assign]
        cache.go.set()
        texts = [f"text {number} " + "stone " * 40 for number in range(150)]
        call = engine.submit("embed", texts)
        until = time.monotonic() + 30
        while sum(len(slots) for _, slots in held) < 150 and time.monotonic() < until:
            time.sleep(0.001)
        assert len(held) > 1
        for delivery in reversed(held[1:]):
            commit(*delivery)
            time.sleep(0.05)
            assert not call.done()
        commit(*held[0])
        assert call.result(30).embeddings.shape == (150, 48)
        assert len(cache) == 150
