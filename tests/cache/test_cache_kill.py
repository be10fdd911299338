"""kill -9 while an engine embeds with a cache: what was computed and is not in the file stays within the bound."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cached import finish, script
from tests.tiny import write_checkpoint

from millpond import Engine, VectorCache

pytestmark = pytest.mark.contract

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("kill") / "bert", "bert")


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


@pytest.mark.slow
@pytest.mark.parametrize("words", [1, 60])
def test_a_killed_engine_loses_at_most_a_batch_for_each_thread_and_what_may_wait(
    model: Path, tmp_path: Path, words: int
) -> None:
    lost, bound = killed(model, tmp_path, words=words, rows=2500)
    assert 0 <= lost <= bound
    assert bound <= 64 + 4096 * 8


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


def test_a_result_is_in_the_file_before_its_caller_has_it(model: Path, tmp_path: Path) -> None:
    with Engine(model, dtype="float32", device="cpu", cache=tmp_path / "cache.db") as engine:
        for size in (1, 16, 17, 300):
            texts = [f"{size} {number}" for number in range(size)]
            held: list[int] = []

            def look(_: Any, held: list[int] = held) -> None:
                with sqlite3.connect(f"file:{tmp_path}/cache.db?mode=ro", uri=True) as connection:
                    held.extend(connection.execute("SELECT count(*) FROM rows").fetchone())
                connection.close()

            before = len(engine.cache or ())
            call = engine.submit("embed", texts)
            call.add_done_callback(look)
            call.result(30)
            engine.embed("a text after it".split())
            assert held == [] or held[0] >= before + size
            assert len(engine.cache or ()) >= before + size


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
