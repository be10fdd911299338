"""The loop of a device: when batches are launched, failures, and a device that fails for good."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recording import Recording
from tests.tiny import TEXTS

from millpond import Engine, VectorCache
from millpond.backends.backend import OutputSpec
from millpond.backends.device_errors import LostDevices
from millpond.backends.torch.cuda import graphs
from millpond.engine.execute import overlapping_worker
from millpond.engine.execute.overlapping_worker import OverlappingWorker
from millpond.engine.execute.worker import Worker
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.errors import DeviceLostError, EngineClosedError
from tests import recording

PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=2)


Refusal = Callable[[Sequence[Request]], BaseException | None]


def agree(requests: Sequence[Request]) -> None:
    return None


class Device:
    """A runner with streams: it logs what is launched and waited for, and how many batches are running."""

    def __init__(self, *, start: Refusal = agree, result: Refusal = agree, free: Exception | None = None) -> None:
        """``free``: raised where memory is freed."""
        self._free = free
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

    def free_memory(self) -> None:
        if self._free is not None:
            raise self._free

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
    monkeypatch.setattr(overlapping_worker, "_AHEAD_TOKENS", 1)
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
    monkeypatch.setattr(overlapping_worker, "_AHEAD_TOKENS", 1)
    device = Device(**{stage: too_large(20)})
    (call,) = drive(device, [8] * 12, budget=32)
    assert lengths(call) == [8] * 12
    assert {entry[1] for entry in device.log if entry[0] == "alone"} == {0}  # no other batch took memory
    assert [len(entry) - 1 for entry in device.log if entry[0] == "start"][-2:] == [2, 2]
    assert device.under_way == 0 or stage == "start"


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
    monkeypatch.setattr(overlapping_worker, "_AHEAD_TOKENS", 1)
    good, bad, other = drive(Device(**{stage: too_large(20)}), [5, 6], [7, 21, 3], [8, 9], budget=64)
    assert lengths(good) == [5, 6] and lengths(other) == [8, 9]
    with pytest.raises(torch.OutOfMemoryError):
        bad.future.result()


def test_memory_that_cannot_be_freed_does_not_stop_the_halves(caplog):
    error = RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
    (call,) = drive(Device(start=too_large(20), free=error), [8] * 4, budget=32)
    assert lengths(call) == [8] * 4
    assert "could not be freed" in caplog.text and "captures_underway" in caplog.text


def test_a_device_that_is_lost_while_memory_is_freed_runs_no_halves():
    error = torch.AcceleratorError("CUDA error: unspecified launch failure")
    device = Device(start=too_large(20), free=error)
    first, second = drive(device, [8] * 4, [8], budget=32)
    for call in (first, second):
        assert isinstance(call.future.exception(), DeviceLostError)
    assert [entry[0] for entry in device.log] == ["start", "alone", "start"]


ILLEGAL = "CUDA error: an illegal memory access was encountered"


MANY = [f"{text} {i}" for i, text in enumerate(TEXTS * 8)]


def illegal() -> Exception:
    return torch.AcceleratorError(f"{ILLEGAL}\nSearch for `cudaErrorIllegalAddress'")


@pytest.fixture(scope="module")
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("bert")


@pytest.fixture(scope="module")
def expected(engine_of: Callable[..., Engine]) -> Any:
    return engine_of("bert").embed(MANY).embeddings


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Engines capture a shape when it is first seen."""
    made = recording.backends_of_engines(monkeypatch)
    monkeypatch.setitem(graphs.Graphs.__init__.__kwdefaults__, "uses", 1)  # type: ignore[index]
    return made


def lose_at(backend: Recording, operation: str, *, after: int = 0) -> None:
    """Lose the device at the next ``operation`` but ``after``; from then on it fails at everything."""
    left = after

    def fault(reached: str) -> None:
        nonlocal left
        if reached == operation:
            left -= 1
            if left < 0:
                backend.lost = illegal()
                raise backend.lost

    backend.fault = fault


def check(error: BaseException | None, device: str = "cpu") -> None:
    assert isinstance(error, DeviceLostError)
    assert (error.device, error.reason) == (device, ILLEGAL)


@pytest.mark.parametrize("operation", ["upload", "capture", "replay", "download", "wait"])
def test_every_call_hears_of_the_loss_and_nothing_is_tried_again(
    operation: str, backends: list[Recording], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(folder, device="cpu", dtype="float32", max_batch_tokens=64) as engine:
        (backend,) = backends
        assert engine.lost_devices == ()
        tried: list[str] = []
        lose_at(backend, operation, after=1)
        fault = backend.fault
        submitted = threading.Event()
        backend.fault = lambda reached: (submitted.wait(60), tried.append(reached), fault(reached))[2]
        futures = [engine.submit("embed", [f"{text} {i}" for text in MANY]) for i in range(3)]
        submitted.set()
        errors = [future.exception(60) for future in futures]
        for error in errors:
            check(error)
        assert tried.count(operation) == 2  # the second one lost it, and none followed
        for call in (lambda: engine.embed(TEXTS), lambda: engine.submit("embed", TEXTS), lambda: engine.check_room(1)):
            with pytest.raises(DeviceLostError, match="restart the process"):
                call()
        (lost,) = engine.lost_devices
        check(lost)
        stats = engine.stats()
        assert (stats.running_calls, stats.waiting_texts, stats.running_batches) == (0, 0, 0)
        assert stats.calls_failed == 3
    critical = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert len(critical) == 1 and "cpu is lost" in critical[0].getMessage()
    with pytest.raises(EngineClosedError):  # closed comes first
        engine.embed(TEXTS)


def test_a_device_lost_in_a_retry_keeps_what_ran_before(
    backends: list[Recording], folder: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "0")
    seen = 0

    def fault(reached: str) -> None:
        nonlocal seen
        if reached == "upload":
            seen += 1
            if seen <= 2:  # the launch, and the batch by itself
                raise torch.OutOfMemoryError("CUDA out of memory")
            if seen == 4:  # the second half
                backends[0].lost = illegal()
                raise backends[0].lost

    cache = VectorCache(tmp_path / "cache.sqlite")
    with Engine(folder, device="cpu", dtype="float32", cache=cache) as engine:
        backends[0].fault = fault
        check(engine.submit("embed", MANY).exception(60))
        assert seen == 4
        assert engine.stats().batch_texts == len(MANY) // 2
    with Engine(folder, device="cpu", dtype="float32", cache=cache) as engine:
        output = engine.embed(MANY)
        assert output.cached.sum() == len(MANY) // 2
        assert np.abs(output.embeddings - expected).max() <= 1e-5
    cache.close()


@pytest.mark.parametrize("operation", ["upload", "wait"])
def test_the_other_devices_go_on(operation: str, backends: list[Recording], folder: Path, expected: Any) -> None:
    with Engine(folder, device=["cpu", "cpu"], dtype="float32", max_batch_tokens=64) as engine:
        lose_at(backends[0], operation)
        futures = []
        while not engine.lost_devices:  # the lost device has to have had a batch
            futures.append(engine.submit("embed", MANY))
            futures[-1].exception(60)
        for future in futures[:-1]:
            assert np.abs(future.result().embeddings - expected).max() <= 1e-5
        check(futures[-1].exception(60))
        before = len(backends[0].log)
        for _ in range(3):
            assert np.abs(engine.embed(MANY).embeddings - expected).max() <= 1e-5
        engine.check_room(1)
        assert len(engine.lost_devices) == 1 and len(backends[0].log) == before
        lose_at(backends[1], operation)
        check(engine.submit("embed", MANY).exception(60))
        with pytest.raises(DeviceLostError):
            engine.embed(TEXTS)
        assert len(engine.lost_devices) == 2


def at(length: int) -> Refusal:
    return lambda requests: illegal() if any(request.length == length for request in requests) else None


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapping_worker, "_AHEAD_TOKENS", 1)


def test_what_was_downloaded_before_is_delivered(eager: None) -> None:
    """The batch of 6 cannot be launched while that of 5 is running, or done."""
    first, second, third = drive(device := Device(start=at(6)), [5], [6], [7], budget=5)
    assert lengths(first) == [5]
    for call in (second, third):
        assert isinstance(call.future.exception(), DeviceLostError)
    assert device.log == [("start", 5), ("start", 6), ("result", 5)]


def test_what_was_launched_after_the_fault_fails(eager: None) -> None:
    class Broken(Device):
        def start(self, requests: Sequence[Request]) -> Underway:
            self._note("start", requests)
            return Underway(self, requests)

    broken = False

    def result(requests: Sequence[Request]) -> BaseException | None:
        nonlocal broken
        broken = broken or requests[0].length == 5
        return illegal() if broken else None

    calls = drive(device := Broken(start=agree, result=result), [4], [5], [6], [7], budget=5)
    assert lengths(calls[0]) == [4]
    for call in calls[1:]:
        assert isinstance(call.future.exception(), DeviceLostError)
    assert device.log[-2:] == [("result", 5), ("result", 6)]  # 7 was never launched


@pytest.mark.parametrize("kind", [Worker, OverlappingWorker])
def test_the_half_that_was_not_run_is_left_to_the_other_device(kind: type[Worker]) -> None:
    """Memory runs out, then the device is lost with the first half: the second half is not to blame."""

    def start(requests: Sequence[Request]) -> BaseException | None:
        if len(requests) > 1:
            return torch.OutOfMemoryError("CUDA out of memory")
        return illegal() if requests[0].length == 5 else None

    scheduler, devices = Scheduler(100), LostDevices(2)
    (bad,), (good,) = ([queued(scheduler, [length])] for length in (5, 6))
    scheduler.close()
    broken = kind(scheduler, Device(start=start), name="broken", device="cuda:0", lost_devices=devices)
    broken.start()
    broken.join()
    assert isinstance(error := bad.future.exception(), DeviceLostError) and error.device == "cuda:0"
    assert not good.done and devices.left == 1
    other = kind(scheduler, Device(), name="other", device="cuda:1", lost_devices=devices)
    other.start()
    other.join()
    assert lengths(good) == [6]
    assert good.future.timings is not None and good.future.timings.inference >= 0


def test_what_comes_after_the_last_device_is_refused_at_every_entrance() -> None:
    scheduler = Scheduler(100)
    scheduler.refuse(lambda: DeviceLostError("gone"))
    call, group, deferred, returned = (queued(Scheduler(100), [length]) for length in (5, 6, 7, 8))
    request = Request(call=call, slot=0, ids=np.zeros(5, dtype=np.int32))
    scheduler.put(call, [request])
    scheduler.put_all([(group, [request])])
    scheduler.defer(deferred)
    scheduler.put_back([Request(call=returned, slot=0, ids=np.zeros(8, dtype=np.int32))])
    for each in (call, group, deferred, returned):
        assert isinstance(each.future.exception(0), DeviceLostError)
    assert scheduler.empty and scheduler.tokens == 0
