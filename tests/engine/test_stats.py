"""Statistics: the times of a call, the counters, the observers of batches; and several devices with one queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import TEXTS, Layout, Normalize, Pooling

from millpond import Engine, PoolingParams, Timings
from millpond.backends.backend import OutputSpec
from millpond.engine.execute.cores import Cores
from millpond.engine.execute.runner import Runner
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule import timing
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.engine.schedule.timing import CallTimer
from millpond.engine.shared import close_shared, get_engine
from millpond.errors import EngineOverloadedError, ModelLoadError

MANY = [f"{text} {i}" for i, text in enumerate(TEXTS * 4)]


PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=2)


@pytest.fixture(scope="module")
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("bert", sentence_transformers=Layout(modules=(Pooling(), Normalize())))


@pytest.fixture(params=["cpu", pytest.param("streams", marks=pytest.mark.torch)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU, or a device on which a batch is launched before the one before has ended."""
    if request.param == "streams":
        from tests import recording

        recording.backends_of_engines(monkeypatch)
    return str(request.param)


@pytest.fixture
def one_intake(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread tokenizes: of two calls of one request, the times do not overlap, and the queue takes the rest."""
    monkeypatch.setattr("millpond.engine.dispatcher._intake_threads", lambda replicas: 1)


@pytest.fixture
def engine(folder: Path, device: str, one_intake: None) -> Iterator[Engine]:
    with Engine(folder, device="cpu", dtype="float32", max_batch_tokens=128) as engine:
        yield engine


class Clock:
    """The clock of call timers, which stands still unless it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def timings_of(engine: Engine, task: Any, inputs: Sequence[Any], **params: Any) -> Timings:
    future = engine.submit(task, inputs, PoolingParams(**params))
    future.result(timeout=60)
    assert future.timings is not None
    return future.timings


@pytest.mark.parametrize("count", [1, 40])
def test_the_parts_of_a_call_are_no_more_than_the_whole(engine: Engine, count: int):
    timings = timings_of(engine, "embed", MANY[:count])
    parts = timings.tokenization, timings.queue, timings.inference
    assert all(part > 0 for part in parts)
    assert sum(parts) <= timings.total


def test_cached_texts_are_never_queued(folder: Path, tmp_path: Path):
    with Engine(folder, device="cpu", dtype="float32", cache=tmp_path / "v.db") as engine:
        assert timings_of(engine, "embed", TEXTS).inference > 0
        again = timings_of(engine, "embed", TEXTS)
    assert (again.tokenization, again.queue, again.inference) == (0, 0, 0)
    assert again.total > 0


def test_there_are_no_timings_before_the_result_or_behind_a_failure(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    gate, entered = threading.Event(), threading.Event()

    def refuse(runner: Runner, requests: Sequence[Request]) -> Any:
        entered.set()
        assert gate.wait(timeout=60)
        raise RuntimeError("no")

    monkeypatch.setattr(Runner, "run", refuse)
    monkeypatch.setattr(Runner, "start", refuse)
    future = engine.submit("embed", ["a"])
    assert entered.wait(timeout=60)
    assert future.timings is None
    gate.set()
    with pytest.raises(RuntimeError, match="no"):
        future.result(timeout=60)
    assert future.timings is None


def test_batches_side_by_side_count_once(clock: Clock):
    timer = CallTimer()
    for now, step in [(101, timer.picked), (103, timer.picked), (106, timer.returned), (109, timer.returned)]:
        clock.now = now
        step()
    clock.now = 120
    assert timer.read() == Timings(tokenization=0, queue=1, inference=8, total=20)


def test_a_batch_that_was_put_back_does_not_run_meanwhile(clock: Clock):
    call = Call(["a"], PLAN, assemble=assemble, native_width=2)
    scheduler = Scheduler(100)
    scheduler.put(call, [Request(call=call, slot=0, ids=np.zeros(3, dtype=np.int32))])
    picked = scheduler.pick()
    clock.now += 1
    scheduler.put_back(picked)
    clock.now += 10
    (request,) = scheduler.pick()
    clock.now += 2
    call.deliver([request.slot], [np.zeros(2, dtype=np.float32)])
    assert call.future.timings == Timings(tokenization=0, queue=0, inference=3, total=13)


def test_counters_balance_behind_failures_cancellations_and_refusals(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
):
    gate, entered = threading.Event(), threading.Semaphore(0)
    ran: list[object] = []
    method = "start" if device == "streams" else "run"
    right: dict[str, Callable[..., Any]] = {name: getattr(Runner, name) for name in ("start", "run")}

    def gated(name: str) -> Callable[..., Any]:
        def run(runner: Runner, requests: Sequence[Request]) -> Any:
            entered.release()
            assert gate.wait(timeout=60)
            texts = [request.call.items[request.slot] for request in requests]
            if "poison" in texts:
                raise RuntimeError("poisoned")
            ran.extend(texts)
            return right[name](runner, requests)

        return run

    for name in {method, "run"}:
        monkeypatch.setattr(Runner, name, gated(name))
    engine = Engine(folder, device="cpu", dtype="float32", max_queue=100)
    blockers = []
    for i, _ in enumerate(engine._dispatcher.workers):  # each has a batch, so that none begins what is cancelled
        blockers.append(engine.submit("embed", [f"blocker {i}"]))
        assert entered.acquire(timeout=60)
    count = len(blockers)
    running = engine.stats()
    assert (running.waiting_texts, running.running_calls) == (count, count) and running.running_batches >= count
    poisoned = engine.submit("embed", ["poison", "fine"])
    cancelled = engine.submit("embed", TEXTS[:5])
    behind = engine.submit("embed", TEXTS[:3])
    with pytest.raises(EngineOverloadedError):
        engine.submit("embed", [f"{i}" for i in range(100)])
    assert cancelled.cancel()
    gate.set()
    wait([*blockers, poisoned, behind])
    engine.close()
    stats = engine.stats()
    assert (stats.waiting_texts, stats.running_calls, stats.running_batches) == (0, 0, 0)
    assert (stats.calls_done, stats.texts_done) == (count + 1, count + 3)
    assert (stats.calls_failed, stats.calls_cancelled, stats.calls_rejected) == (1, 1, 1)
    # Of the failed call, "fine" runs or is dropped; "poison" never runs.
    assert stats.batch_texts == len(ran) and count + 3 <= stats.batch_texts <= count + 4


def test_the_cache_counts_distinct_texts(folder: Path, tmp_path: Path):
    with Engine(folder, device="cpu", dtype="float32", cache=tmp_path / "v.db") as engine:
        engine.embed(["a", "b", "b"])
        engine.embed(["a", "c"])
        engine.token_embed(["a"])  # which no cache holds
        engine.close()
        stats = engine.stats()
    assert (stats.cache_hits, stats.cache_misses) == (1, 3)
    assert stats.batch_texts == 4
    assert stats.texts_done == 6


def test_an_observer_hears_of_every_batch_before_its_callers(engine: Engine):
    batches: list[Any] = []
    end = engine.observe(batches.append)
    engine.embed(MANY)
    stats = engine.stats()
    assert len(batches) == stats.batches > 1
    assert sum(batch.texts for batch in batches) == stats.batch_texts == len(MANY)
    assert sum(batch.tokens for batch in batches) == stats.batch_tokens
    assert sum(batch.seconds for batch in batches) == pytest.approx(stats.batch_seconds)
    assert all(batch.seconds > 0 for batch in batches)
    end()
    engine.embed(["nobody hears of this"])
    assert len(batches) == stats.batches


def test_an_observer_that_fails_harms_nobody(engine: Engine, caplog: pytest.LogCaptureFixture):
    expected = engine.embed(MANY).embeddings
    batches: list[Any] = []

    class Broken:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, batch: Any) -> None:
            raise RuntimeError("broken observer")

    engine.observe(Broken())
    engine.observe(batches.append)
    before = engine.stats()
    np.testing.assert_allclose(engine.embed(MANY).embeddings, expected, atol=1e-6)
    after = engine.stats()
    assert len(batches) == after.batches - before.batches > 1
    assert [record.getMessage() for record in caplog.records if "observer" in record.getMessage()][1:] == []
    assert "broken observer" in caplog.text


TWO = ["cpu", "cpu"]


@pytest.fixture(scope="module")
def expected(folder: Path, engine_of: Callable[..., Engine]) -> Any:
    return engine_of(folder).embed(MANY).embeddings


@pytest.fixture(params=["cpu", pytest.param("streams", marks=pytest.mark.torch)])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> set[Runner]:
    """Each replica holds its first batch until the other one has a batch; returns the runners that ran."""
    # A lane of each replica needs a core while it waits for the other one.
    monkeypatch.setattr("millpond.engine.dispatcher.process_cores", lambda: Cores(16))
    if request.param == "streams":
        from tests import recording

        recording.backends_of_engines(monkeypatch)
    method = "start" if request.param == "streams" else "run"
    right, used, all_used = getattr(Runner, method), set[Runner](), threading.Event()

    def run(runner: Runner, requests: Sequence[Request]) -> Any:
        used.add(runner)
        if len(used) == 2:
            all_used.set()
        assert all_used.wait(timeout=60)
        return right(runner, requests)

    monkeypatch.setattr(Runner, method, run)
    return used


@pytest.mark.torch
def test_replicas_share_the_work_and_agree(both, folder, expected):
    with Engine(folder, device=TWO, dtype="float32", max_batch_tokens=64) as engine:
        found = engine.embed(MANY).embeddings
        assert len(engine._replicas.runners) == 2
    assert len(both) == 2
    assert np.abs(found - expected).max() <= 1e-6


@pytest.mark.torch
def test_a_list_and_its_spelling_are_one_shared_engine(folder):
    try:
        engine = get_engine(folder, device=TWO, dtype="float32")
        assert engine.device == "cpu,cpu"
        for spelling in ("cpu,cpu", ("cpu", "cpu"), "cpu, cpu", engine.device):
            assert get_engine(folder, device=spelling, dtype="float32") is engine
        assert get_engine(folder, device="cpu", dtype="float32") is not engine
    finally:
        close_shared()


@pytest.mark.parametrize("device", ["cpu,", ["cpu", "meta"], "cpu,nonsense", ["auto", "nonsense"]])
def test_devices_that_cannot_be_used_together_are_refused(device, folder):
    with pytest.raises(ModelLoadError, match="device"):
        Engine(folder, device=device)


@pytest.mark.torch
@pytest.mark.contract
def test_a_child_of_a_process_that_used_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from millpond.backends.torch.loading.placement import resolve_devices

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # also after a mere look for GPUs
    assert resolve_devices("auto") == resolve_devices("cpu") == (torch.device("cpu"),)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match="forked from one that had used the GPU.*spawn"):
        resolve_devices("auto")
    assert resolve_devices("cpu") == (torch.device("cpu"),)
