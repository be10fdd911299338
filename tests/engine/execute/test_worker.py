"""Batches that fail, and what happens to their calls."""

import numpy as np
import pytest
import torch

from millpond.engine.execute.device_errors import is_out_of_memory
from millpond.engine.execute.worker import Worker
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.errors import MillpondError
from millpond.pooling.pooler import OutputSpec

PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=2)


class Recording:
    """A runner that answers with each text's length, refuses some batches, and records them all."""

    def __init__(self, refuse):
        self.batches = []
        self.refuse = refuse

    def run(self, requests):
        self.batches.append([request.length for request in requests])
        error = self.refuse(requests)
        if error is not None:
            raise error
        return [(request, np.full(2, request.length, dtype=np.float32)) for request in requests]


def drive(refuse, *lengths_of_calls, budget=1000):
    """Run calls through a worker; returns the finished calls and the runner."""
    scheduler, runner = Scheduler(budget), Recording(refuse)
    calls = []
    for lengths in lengths_of_calls:
        texts = [f"{i}" for i in range(len(lengths))]
        call = Call(texts, PLAN, assemble=assemble, native_width=2)
        requests = [Request(call=call, slot=i, ids=np.zeros(n, dtype=np.int32)) for i, n in enumerate(lengths)]
        scheduler.put(call, requests)
        calls.append(call)
    scheduler.close()
    worker = Worker(scheduler, runner, name="test")
    worker.start()
    worker.join()
    return calls, runner


def out_of_memory_above(limit):
    return lambda requests: torch.OutOfMemoryError("no") if sum(r.length for r in requests) > limit else None


def test_out_of_memory_halves_the_batch_and_goes_on():
    (call,), runner = drive(out_of_memory_above(20), [8, 8, 8, 8])
    assert call.future.result().embeddings[:, 0].tolist() == [8, 8, 8, 8]
    assert runner.batches == [[8, 8, 8, 8], [8, 8], [8, 8]]


def test_out_of_memory_bounds_the_batches_that_follow():
    (call,), runner = drive(out_of_memory_above(100), [50] * 8, budget=200)
    assert call.future.result().embeddings[:, 0].tolist() == [50] * 8
    assert [sum(batch) for batch in runner.batches[3:]] == [100, 100]


def test_a_text_that_never_fits_fails_its_own_call_only():
    (bad, good), _ = drive(out_of_memory_above(20), [4, 90, 4], [4, 4])
    with pytest.raises(torch.OutOfMemoryError):
        bad.future.result()
    assert good.future.result().embeddings[:, 0].tolist() == [4, 4]


def test_any_error_is_kept_to_the_call_that_caused_it():
    def refuse(requests):
        return RuntimeError("odd shape") if any(request.length == 13 for request in requests) else None

    (good, bad, also_good), _ = drive(refuse, [5, 6], [7, 13], [8])
    assert good.future.result().embeddings[:, 0].tolist() == [5, 6]
    assert also_good.future.result().embeddings[:, 0].tolist() == [8]
    with pytest.raises(RuntimeError, match="odd shape"):
        bad.future.result()


def test_a_vector_that_is_not_finite_fails_with_its_index():
    scheduler = Scheduler(100)
    call = Call(["a", "b"], PLAN, assemble=assemble, native_width=2)
    requests = [Request(call=call, slot=i, ids=np.zeros(3, dtype=np.int32)) for i in range(2)]
    scheduler.put(call, requests)
    scheduler.close()

    class Overflowing:
        def run(self, requests):
            return [(r, np.array([1, np.inf if r.slot else 1], dtype=np.float32)) for r in requests]

    worker = Worker(scheduler, Overflowing(), name="test")
    worker.start()
    worker.join()
    with pytest.raises(MillpondError, match=r"index 1 .*not finite.*float32"):
        call.future.result()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA out of memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, expected):
    assert is_out_of_memory(error) is expected
