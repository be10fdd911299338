"""The loop of a device: when batches are launched, the order of results, and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from millpond.engine.execute.cuda import worker as cuda_worker
from millpond.engine.execute.cuda.worker import OverlappingWorker
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.errors import DeviceLostError
from millpond.pooling.pooler import OutputSpec

PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=2)
Refusal = Callable[[Sequence[Request]], BaseException | None]


def agree(requests: Sequence[Request]) -> None:
    return None


class Device:
    """A runner with streams: it logs what is launched and waited for, and how many batches are running."""

    def __init__(self, *, start: Refusal = agree, result: Refusal = agree) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.most = self.under_way = 0
        self._refusals = {"start": start, "result": result}

    def start(self, requests: Sequence[Request]) -> Underway:
        self._note("start", requests)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return Underway(self, requests)

    def run(self, requests: Sequence[Request]) -> list[Any]:
        self.log.append(("alone", self.under_way))
        return self.start(requests).result()

    def _note(self, event: str, requests: Sequence[Request]) -> None:
        self.log.append((event, *(request.length for request in requests)))
        error = self._refusals[event](requests)
        if error is not None:
            raise error


class Underway:
    def __init__(self, device: Device, requests: Sequence[Request]) -> None:
        self._device, self._requests = device, requests

    def result(self) -> list[Any]:
        self._device.under_way -= 1
        self._device._note("result", self._requests)
        return [(request, np.full(2, request.length, dtype=np.float32)) for request in self._requests]


def queued(scheduler: Scheduler, lengths: Sequence[int]) -> Call:
    """A call of texts of these lengths, in the queue."""
    call = Call([f"{i}" for i in range(len(lengths))], PLAN, assemble=assemble, native_width=2)
    scheduler.put(call, [Request(call=call, slot=i, ids=np.zeros(n, dtype=np.int32)) for i, n in enumerate(lengths)])
    return call


def drive(device: Device, *lengths_of_calls: list[int], budget: int) -> list[Call]:
    """Run calls through a worker until they are done."""
    scheduler = Scheduler(budget)
    calls = [queued(scheduler, lengths) for lengths in lengths_of_calls]
    scheduler.close()
    worker = OverlappingWorker(scheduler, device, name="test")
    worker.start()
    worker.join()
    return calls


def lengths(call: Call) -> list[float]:
    column: list[float] = call.future.result().embeddings[:, 0].tolist()
    return column


def test_the_next_batch_is_sent_before_the_first_is_waited_for(monkeypatch):
    monkeypatch.setattr(cuda_worker, "_AHEAD_TOKENS", 1)
    device = Device()
    (call,) = drive(device, [5, 6, 7, 8], budget=8)
    assert lengths(call) == [5, 6, 7, 8]
    order = ["start", "start", "result", "start", "result", "start", "result", "result"]
    assert device.log == list(zip(order, [5, 6, 5, 7, 6, 8, 7, 8], strict=True))
    assert device.most == 2


def test_few_waiting_tokens_are_not_launched_ahead():
    device = Device()
    (call,) = drive(device, [5, 6], budget=8)
    assert lengths(call) == [5, 6]
    assert device.log == [("start", 5), ("result", 5), ("start", 6), ("result", 6)]


@pytest.mark.parametrize("stage", ["start", "result"])
def test_out_of_memory_halves_the_batch_and_bounds_the_next_ones(stage, monkeypatch):
    monkeypatch.setattr(cuda_worker, "_AHEAD_TOKENS", 1)

    def refuse(requests: Sequence[Request]) -> BaseException | None:
        return torch.OutOfMemoryError("no") if sum(request.length for request in requests) > 20 else None

    device = Device(**{stage: refuse})
    (call,) = drive(device, [8] * 12, budget=32)
    assert lengths(call) == [8] * 12
    assert {entry[1] for entry in device.log if entry[0] == "alone"} == {0}  # no other batch took memory
    assert [len(entry) - 1 for entry in device.log if entry[0] == "start"][-2:] == [2, 2]
    assert device.under_way == 0 or stage == "start"


@pytest.mark.parametrize("stage", ["start", "result"])
def test_any_error_is_kept_to_the_call_that_caused_it(stage, monkeypatch):
    monkeypatch.setattr(cuda_worker, "_AHEAD_TOKENS", 1)

    def refuse(requests: Sequence[Request]) -> BaseException | None:
        return RuntimeError("odd shape") if any(request.length == 13 for request in requests) else None

    good, bad, other = drive(Device(**{stage: refuse}), [5, 6], [7, 13], [8, 9, 10], budget=20)
    assert lengths(good) == [5, 6] and lengths(other) == [8, 9, 10]
    with pytest.raises(RuntimeError, match="odd shape"):
        bad.future.result()


def test_a_result_that_cannot_be_delivered_stops_nobody_else(monkeypatch):
    class Odd(Device):
        def start(self, requests: Sequence[Request]) -> Underway:
            underway = super().start(requests)
            if requests[0].length == 5:
                monkeypatch.setattr(underway, "result", lambda: [(requests[0],)])
            return underway

    first, second = drive(Odd(), [5], [6], budget=5)
    with pytest.raises(ValueError, match="unpack"):
        first.future.result()
    assert lengths(second) == [6]


def too_large(limit: int) -> Refusal:
    """Memory for ``limit`` tokens."""
    return lambda requests: torch.OutOfMemoryError("no") if sum(r.length for r in requests) > limit else None


@pytest.mark.parametrize("stage", ["start", "result"])
def test_a_text_without_memory_even_alone_fails_its_own_call_only(stage, monkeypatch):
    monkeypatch.setattr(cuda_worker, "_AHEAD_TOKENS", 1)
    good, bad, other = drive(Device(**{stage: too_large(20)}), [5, 6], [7, 21, 3], [8, 9], budget=64)
    assert lengths(good) == [5, 6] and lengths(other) == [8, 9]
    with pytest.raises(torch.OutOfMemoryError):
        bad.future.result()


def test_memory_that_cannot_be_freed_does_not_stop_the_halves(monkeypatch, caplog):
    def empty_cache() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    (call,) = drive(Device(start=too_large(20)), [8] * 4, budget=32)
    assert lengths(call) == [8] * 4
    assert "could not be freed" in caplog.text


def test_a_device_that_is_lost_while_memory_is_freed_runs_no_halves(monkeypatch):
    def empty_cache() -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    device = Device(start=too_large(20))
    first, second = drive(device, [8] * 4, [8], budget=32)
    for call in (first, second):
        assert isinstance(call.future.exception(), DeviceLostError)
    assert [entry[0] for entry in device.log] == ["start", "alone", "start"]


def test_the_loop_survives_a_bug_in_the_scheduler(monkeypatch, caplog):
    right, failed = Scheduler._pick, []

    def once(self: Scheduler, lanes: int) -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("a bug")
        return right(self, lanes)

    monkeypatch.setattr(Scheduler, "_pick", once)
    (call,) = drive(Device(), [5, 6], budget=8)
    assert call.future.done() and lengths(call) == [5, 6]
    assert failed and "a batch was lost" in caplog.text
