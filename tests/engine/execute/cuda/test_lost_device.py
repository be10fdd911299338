"""A device that fails for good: no batch is halved on it, every caller hears, and the other devices go on."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.execute.cuda.test_overlapping_worker import Device, Underway, agree, drive, lengths, queued
from tests.recording import Recording
from tests.tiny import TEXTS, write_checkpoint

from millpond import AsyncEngine, Engine, VectorCache
from millpond.engine import loading
from millpond.engine.execute.cuda import graphs
from millpond.engine.execute.cuda import worker as cuda_worker
from millpond.engine.execute.cuda.worker import OverlappingWorker
from millpond.engine.execute.device_errors import LostDevices
from millpond.engine.execute.worker import Worker
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.errors import DeviceLostError, EngineClosedError
from tests import recording

ILLEGAL = "CUDA error: an illegal memory access was encountered"
MANY = [f"{text} {i}" for i, text in enumerate(TEXTS * 8)]


def illegal() -> Exception:
    return torch.AcceleratorError(f"{ILLEGAL}\nSearch for `cudaErrorIllegalAddress'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("lost") / "model", "bert")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[Any]:
    with Engine(folder, device="cpu", dtype="float32") as engine:
        yield engine.embed(MANY).embeddings


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Every engine loaded from here on has a recording backend, and captures a shape when it is first seen."""
    recording.pretend_varlen(monkeypatch)
    made: list[Recording] = []

    def backend(device: torch.device) -> Recording:
        made.append(Recording())
        return made[-1]

    monkeypatch.setattr(loading, "_backend", backend)
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


def run_out(backend: Recording) -> None:
    """Memory runs out at the next launch, and the device is lost in what follows from that."""

    def fault(reached: str) -> None:
        backend.lost = illegal()
        raise torch.OutOfMemoryError("CUDA out of memory")

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


def test_a_device_lost_while_memory_is_freed_is_lost(backends: list[Recording], folder: Path) -> None:
    with Engine(folder, device="cpu", dtype="float32") as engine:
        run_out(backends[0])
        check(engine.submit("embed", MANY).exception(60))
        assert len(engine.lost_devices) == 1


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


def test_coroutines_hear_of_it_too(backends: list[Recording], folder: Path) -> None:
    async def ask(engine: Engine) -> list[Any]:
        asked = AsyncEngine(engine)
        lose_at(backends[0], "upload")
        return await asyncio.gather(*(asked.embed([text]) for text in MANY), return_exceptions=True)

    with Engine(folder, device="cpu", dtype="float32") as engine:
        for error in asyncio.run(ask(engine)):
            check(error)


Refusals = Callable[[Sequence[Request]], BaseException | None]


def at(length: int) -> Refusals:
    return lambda requests: illegal() if any(request.length == length for request in requests) else None


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_worker, "_AHEAD_TOKENS", 1)


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
