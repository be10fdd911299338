"""What the GPU path asks of a device: streams, pinned copies and captured graphs, behind one small protocol.

There are two streams. Uploads, forwards and whatever is read from their states go down the first, in the order of the
batches, so that no two of them need an event between them; downloads go down the second, each behind an event of the
first. (An upload is some 100 KB: on a stream of its own it would need two of every buffer to save microseconds.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

# Forwards before a capture: kernels are compiled and chosen, and workspaces are made, in the first ones.
_WARM_UPS = 2


class Event(Protocol):
    """Something that a stream will have done."""

    def wait(self) -> None:
        """Hold this thread until it is done.

        Raises:
            RuntimeError: A kernel failed; which one is not known.
        """
        ...


class Graph(Protocol):
    """A captured forward."""

    def replay(self) -> None:
        """Launch it."""
        ...


class Backend(Protocol):
    """A device, driven by one thread; no method but :meth:`drain` waits for what it launches."""

    def computing(self) -> AbstractContextManager[Any]:
        """What is launched inside goes down the compute stream."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """int32 ``[size]`` on the host, to be uploaded once; it may be dropped at once."""
        ...

    def block(self, size: int) -> torch.Tensor:
        """int32 ``[size]`` on the device."""
        ...

    def upload(self, host: torch.Tensor, block: torch.Tensor) -> None:
        """Copy pinned memory to the device, on the compute stream."""
        ...

    def download(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
        """Pinned copies of what the compute stream has made so far, filled once the event is done.

        The tensors must be kept until then.
        """
        ...

    def capture(self, forward: Callable[[], T]) -> tuple[Graph, T]:
        """Run ``forward`` to warm up, then capture it; its result is where every replay leaves its own.

        What it reads and what it returns keep their places in memory. Replays share one pool for all that is between:
        a result is good until the next replay of any graph.
        """
        ...

    def forget(self) -> None:
        """All graphs are gone, or one could not be captured: later ones get memory of their own."""
        ...

    def drain(self) -> None:
        """Wait for everything."""
        ...


class Cuda:
    """A CUDA device."""

    # torch allows one capture in a process at a time, whatever its device.
    _capturing = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.Stream(device)
        self._copying = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # The weights came by the default stream.
        self._compute.wait_stream(torch.cuda.default_stream(device))

    def computing(self) -> AbstractContextManager[Any]:
        """As the protocol has it; the device is the current one inside, as Triton's kernels need it."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._compute)
        return context

    def pinned(self, size: int) -> torch.Tensor:
        """As the protocol has it: torch's allocator keeps pinned blocks, and reuses one when its copies are done."""
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def block(self, size: int) -> torch.Tensor:
        """As the protocol has it."""
        with self.computing():
            return torch.empty(size, dtype=torch.int32, device=self._device)

    def upload(self, host: torch.Tensor, block: torch.Tensor) -> None:
        """As the protocol has it."""
        with self.computing():
            block.copy_(host, non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
        """As the protocol has it."""
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
        """As the protocol has it."""
        with self.computing():
            for _ in range(_WARM_UPS):
                forward()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, another replica's or a caller's own.
        with (
            self._capturing,
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._compute, capture_error_mode="thread_local"),
        ):
            out = forward()
        return graph, out

    def forget(self) -> None:
        """As the protocol has it: a pool whose last graph is gone cannot be used again."""
        self._pool = torch.cuda.graph_pool_handle()

    def drain(self) -> None:
        """As the protocol has it."""
        self._compute.synchronize()
        self._copying.synchronize()


class _Done:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
