"""Streams: a small protocol with the device operations of the GPU path: streams, pinned copies, captured graphs.

Uploads, forwards and outputs run on the first stream, in the order of the batches, and downloads on the second. What
the host waits for in between runs on the third: in the second, the next batch's download may already wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

# Forwards before a capture: the first ones compile and choose kernels and allocate workspaces.
_WARM_UPS = 2


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Wait until the stream has reached it."""


class Graph(Protocol):
    """A captured forward."""

    def replay(self) -> None:
        """Launch it."""


class Streams(Protocol):
    """A device, driven by one thread; only :meth:`drain` waits for it, and what runs in :meth:`copying`."""

    def computing(self) -> AbstractContextManager[Any]:
        """Context in which kernels are launched on the compute stream."""

    def copying(self) -> AbstractContextManager[Any]:
        """Context in which kernels are launched, and waited for, beside those of the compute stream.

        They read what the host has waited for, and wait for nothing that was launched since.
        """

    def pinned(self, size: int) -> torch.Tensor:
        """int32 ``[size]`` on the host, to be uploaded once; may be dropped right after that."""

    def buffer(self, size: int) -> torch.Tensor:
        """A buffer, int32 ``[size]``, on the device."""

    def upload(self, host: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy pinned memory to a buffer on the device, on the compute stream."""

    def download(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
        """Pinned copies of tensors that the compute stream has written, valid after the event.

        The tensors must be kept alive until then.
        """

    def capture(self, forward: Callable[[], T]) -> tuple[Graph, T]:
        """Run ``forward`` to warm up, then capture it; every replay writes into the result that is returned.

        The tensors that it reads and returns keep their memory. All graphs share one pool for intermediate values: a
        result is valid until the next replay of any graph.
        """

    def forget(self) -> None:
        """Give later graphs a new memory pool: all graphs are gone, or a capture failed."""

    def drain(self) -> None:
        """Wait for all work on the device."""


class Cuda:
    """A CUDA device."""

    # torch allows one capture in a process at a time, on any device.
    _capturing = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.Stream(device)
        self._copying = torch.cuda.Stream(device)
        self._late = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # The weights were copied on the current stream of this thread, which loads them, or on the default stream.
        for stream in (torch.cuda.current_stream(device), torch.cuda.default_stream(device)):
            self._compute.wait_stream(stream)

    def computing(self) -> AbstractContextManager[Any]:
        """See :class:`Streams`; inside, the device is the current one, as Triton's kernels need."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._compute)
        return context

    def copying(self) -> AbstractContextManager[Any]:
        """See :class:`Streams`."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._late)
        return context

    def pinned(self, size: int) -> torch.Tensor:
        """See :class:`Streams`; torch's allocator reuses a pinned block once its copies are done."""
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def buffer(self, size: int) -> torch.Tensor:
        """See :class:`Streams`."""
        with self.computing():
            return torch.empty(size, dtype=torch.int32, device=self._device)

    def upload(self, host: torch.Tensor, buffer: torch.Tensor) -> None:
        """See :class:`Streams`."""
        with self.computing():
            buffer.copy_(host, non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
        """See :class:`Streams`."""
        self._copying.wait_stream(self._compute)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._copying):
            hosts = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            done.record(self._copying)
        return hosts, _Done(done)

    def capture(self, forward: Callable[[], T]) -> tuple[Graph, T]:
        """See :class:`Streams`."""
        with self.computing():
            for _ in range(_WARM_UPS):
                forward()
        graph, failures = torch.cuda.CUDAGraph(), list[Exception]()
        # torch's context does not restore the stream if the end of the capture fails; the outer one does.
        with self._capturing, torch.cuda.device(self._device), self.computing():
            try:
                # Other threads may allocate meanwhile: another replica's, or a caller's.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._compute, capture_error_mode="thread_local"):
                    try:
                        out = forward()
                    except Exception as error:  # the end of the capture would raise another one in its place
                        failures.append(error)
            except Exception as error:
                failures.append(error)
            if failures:
                self._abandon(graph)
                del failures[1:]  # it follows from the first one
                raise failures.pop()
        return graph, out

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Undo what a failed capture has left.

        From torch 2.13 on the end of a capture, failed or not, ends the allocator's use of the pool. In 2.11 and 2.12 a
        failed end leaves it, and in all of them a failed beginning does. The allocator then holds a capture to be
        underway, and asserts that there is none when it has to free memory (pytorch#180395, #190308). What the pool
        has reserved is not given back before the process ends, up to 2.13 (#190348): so a shape whose capture failed is
        not tried again.
        """
        with suppress(RuntimeError):
            graph.reset()
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with suppress(RuntimeError):  # "not currently recording": all is well
                end(torch.cuda.current_device(), self._pool)

    def forget(self) -> None:
        """See :class:`Streams`; a pool whose last graph is gone cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()

    def drain(self) -> None:
        """See :class:`Streams`."""
        self._compute.synchronize()
        self._copying.synchronize()
        self._late.synchronize()


class _Done:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
