"""The CUDA backend over stand-ins for torch's streams, events and graphs: what is asked of them, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from millpond.backends.torch.cuda.streams import Cuda


class Runtime:
    """What torch asks of CUDA: one line for each step, with the stream that was current, in ``log``."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = 0
        self.current = "loading"
        self.devices: list[Any] = []
        self.pools = 0
        self.recording_to: set[tuple[int, int]] = set()  # pools that the allocator routes to
        self.begin_error: Exception | None = None
        self.end_error: Exception | None = None
        self.leaves_pool = False  # as torch 2.11 and 2.12 at a failed end
        self.lock_was_free: list[bool] = []

    def note(self, what: str) -> None:
        self.log.append(f"{self.current}: {what}")


class Stream:
    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime, self.name = runtime, name

    def wait_stream(self, other: Stream) -> None:
        self.runtime.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.runtime.log.append(f"host waits for {self.name}")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    names = iter(("compute", "copying", "late"))

    def new_stream(device: torch.device) -> Stream:
        return Stream(made, next(names))

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before, made.current = made.current, stream.name
        try:
            yield
        finally:
            made.current = before

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        made.devices.append(device)
        try:
            yield
        finally:
            made.devices.pop()

    class Event:
        def record(self, stream: Stream) -> None:
            made.note(f"event after {stream.name}")

        def synchronize(self) -> None:
            made.note("host waits for the event")

    class CUDAGraph:
        pool: tuple[int, int] | None = None

        def replay(self) -> None:
            made.note("replay")

        def reset(self) -> None:
            made.note("reset")

    class graph:  # noqa: N801  # as torch's
        """torch's context: it leaves the stream as it is if the beginning or the end of the capture fails."""

        def __init__(self, graph: CUDAGraph, *, pool: Any, stream: Stream, capture_error_mode: str) -> None:
            self.graph, self.pool, self.stream, self.mode = graph, pool, stream, capture_error_mode

        def __enter__(self) -> None:
            self.before, made.current = made.current, self.stream.name
            made.lock_was_free.append(Cuda._capturing.acquire(blocking=False))
            made.recording_to.add(self.pool)
            if made.begin_error is not None:
                raise made.begin_error
            made.note(f"begin {self.mode} on device {made.devices[-1:]}")

        def __exit__(self, *_: object) -> None:
            made.note("end")
            if not made.leaves_pool:
                made.recording_to.discard(self.pool)
            if made.end_error is not None:
                raise made.end_error
            made.recording_to.discard(self.pool)
            made.current = self.before

    def new_pool() -> tuple[int, int]:
        made.pools += 1
        return (0, made.pools)

    def end_pool(device: int, pool: tuple[int, int]) -> None:
        assert device == 3
        if pool not in made.recording_to:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        made.recording_to.discard(pool)

    empty = torch.empty

    def empty_pinned(size: Any, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made.note(f"empty{' pinned' if pin_memory else ''}")
        return empty(size, **options)

    copy = torch.Tensor.copy_

    def copy_noted(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        made.note("copy" if non_blocking else "blocking copy")
        return copy(self, other)

    for name, value in {
        "Stream": new_stream,
        "stream": on_stream,
        "device": on_device,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": new_pool,
        "current_stream": lambda device: Stream(made, "loading"),
        "default_stream": lambda device: Stream(made, "default"),
        "current_device": lambda: 3,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", empty_pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_noted)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_pool, raising=False)
    return made


DEVICE = torch.device("cpu")


@pytest.fixture
def cuda(runtime: Runtime) -> Cuda:
    made = Cuda(DEVICE)
    assert runtime.log == ["compute waits for loading", "compute waits for default"]  # the weights were copied there
    runtime.log.clear()
    return made


def test_an_upload_is_pinned_and_on_the_compute_stream(cuda: Cuda, runtime: Runtime) -> None:
    host, buffer = cuda.pinned(4), cuda.buffer(4)
    host.copy_(torch.arange(4))
    runtime.log.clear()
    cuda.upload(host, buffer)
    assert runtime.log == ["compute: copy"]
    assert buffer.tolist() == [0, 1, 2, 3] and buffer.dtype == host.dtype == torch.int32
    assert buffer.device == DEVICE and runtime.current == "loading"


def test_a_download_waits_for_the_compute_stream_and_is_waited_for(cuda: Cuda, runtime: Runtime) -> None:
    tensors = [torch.ones(2, 3), torch.zeros(1)]
    hosts, done = cuda.download(tensors)
    assert runtime.log == [
        "copying waits for compute",
        *["copying: empty pinned", "copying: copy"] * 2,
        "copying: event after copying",
    ]
    done.wait()
    assert runtime.log[-1] == "loading: host waits for the event"
    assert [host.tolist() for host in hosts] == [tensor.tolist() for tensor in tensors]
    assert runtime.current == "loading"


def test_a_capture_warms_up_and_is_alone(cuda: Cuda, runtime: Runtime) -> None:
    graph, out = cuda.capture(lambda: runtime.note("forward") or 7)
    assert out == 7
    assert runtime.log == [
        "compute: forward",
        "compute: forward",
        "compute: begin thread_local on device [device(type='cpu')]",
        "compute: forward",
        "compute: end",
    ]
    assert runtime.lock_was_free == [False]  # no other thread can begin one meanwhile
    assert not Cuda._capturing.locked() and runtime.current == "loading" and runtime.devices == []
    with cuda.computing():
        graph.replay()
    assert runtime.log[-1] == "compute: replay"


def test_all_graphs_share_a_pool_until_it_is_forgotten(
    cuda: Cuda, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[Any] = []
    right = torch.cuda.graph
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, **options: pools.append(options["pool"]) or right(graph, **options)
    )
    for forgets in (False, False, True):
        if forgets:
            cuda.forget()
        cuda.capture(lambda: None)
    assert pools == [(0, 1), (0, 1), (0, 2)]


def failing(at: int, error: Exception) -> Callable[[], None]:
    calls = 0

    def forward() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    return forward


ENDED = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize("leaves_pool", [False, True], ids=["2.13", "2.11"])
@pytest.mark.parametrize("end_fails", [False, True])
def test_the_error_of_a_failed_capture_is_that_of_the_forward(
    end_fails: bool, leaves_pool: bool, cuda: Cuda, runtime: Runtime
) -> None:
    runtime.end_error, runtime.leaves_pool = ENDED if end_fails else None, leaves_pool
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        cuda.capture(failing(3, error))
    assert raised.value is error
    assert runtime.recording_to == set()  # the allocator knows that nothing is being captured
    assert "compute: end" in runtime.log and runtime.log[-1] == "compute: reset"
    assert runtime.current == "loading" and not Cuda._capturing.locked()


@pytest.mark.parametrize("leaves_pool", [False, True], ids=["2.13", "2.11"])
def test_a_capture_whose_end_fails_is_undone(leaves_pool: bool, cuda: Cuda, runtime: Runtime) -> None:
    runtime.end_error, runtime.leaves_pool = ENDED, leaves_pool
    with pytest.raises(torch.AcceleratorError, match="during capture"):
        cuda.capture(lambda: None)
    assert runtime.recording_to == set() and runtime.current == "loading"


def test_a_capture_that_cannot_begin_is_undone(cuda: Cuda, runtime: Runtime) -> None:
    runtime.begin_error = RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
    with pytest.raises(RuntimeError, match="captures_underway"):
        cuda.capture(lambda: None)
    assert runtime.recording_to == set() and runtime.current == "loading"
    runtime.begin_error = None
    cuda.capture(lambda: None)  # the lock is free again


def test_a_torch_without_the_function_raises_the_same_error(
    cuda: Cuda, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    with pytest.raises(ValueError, match="odd"):
        cuda.capture(failing(3, ValueError("odd")))


def test_what_waits_does_not_wait_for_the_batch_that_was_launched_since(cuda: Cuda, runtime: Runtime) -> None:
    """The copying stream does: the next batch's download is in it already, behind that batch's forward."""
    _, done = cuda.download([torch.ones(1)])
    cuda.download([torch.ones(1)])  # of the next batch, which still runs
    done.wait()
    with cuda.copying():
        stream = runtime.current
    assert not any(line.startswith(f"{stream} waits") for line in runtime.log)
    assert runtime.current == "loading"
