"""WorkerSlots: the parts of a device that run a batch each, side by side: of a CPU its cores, else the device.

On one thread an operator ends in no barrier. A batch that runs alone takes the free cores too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from millpond.backends.backend import Threads
from millpond.engine.execute.cores import Cores

# More slots gain nothing: with more cores than this, each slot has several threads.
MOST_WORKERS = 8


class WorkerSlots(Protocol):
    """Shared by an engine's workers on one device."""

    count: int  # slots, and workers
    shared: bool  # whether any thread may run a batch

    def enter(self) -> None:
        """Prepare the calling worker thread; called once per thread."""

    def claim(self, *, wait: bool) -> bool:
        """Claim a slot for one batch, if one is free, or after a ``wait`` for one; returns whether it was claimed."""

    def release(self) -> None:
        """Give the claimed slot back."""

    def free(self) -> int:
        """Number of free slots besides the claimed one."""

    @contextmanager
    def running(self, tokens: int, *, alone: bool) -> Iterator[None]:
        """Context of a batch on a claimed slot; ``alone``: no other request waits."""


class CpuWorkerSlots:
    """The cores of a CPU, one for each slot."""

    shared = True

    def __init__(self, threads: Threads, cores: Cores) -> None:
        self._threads = threads
        self._cores = cores
        self.count = max(1, min(threads.most, cores.count, MOST_WORKERS))

    def enter(self) -> None:
        """Prepare the thread for batches."""
        self._threads.enter()

    def claim(self, *, wait: bool) -> bool:
        """Claim a core."""
        return self._cores.claim(wait=wait)

    def release(self) -> None:
        """Release the core."""
        self._cores.release()

    def free(self) -> int:
        """Number of free cores, at most as many as there are other slots."""
        return min(self._cores.free, self.count - 1)

    @contextmanager
    def running(self, tokens: int, *, alone: bool) -> Iterator[None]:
        """Run on as many threads as pay for the batch and as there are free cores; less if other requests wait."""
        awake = threading.current_thread() is threading.main_thread()
        threads = self._threads.count(tokens, awake=awake)
        # With fewer slots than cores, each slot has an equal part of the cores.
        part = max(1, self._threads.most // self.count)
        more = self._cores.widen((threads if alone else min(threads, part)) - 1)
        try:
            with self._threads.running(1 + more, awake=awake):
                yield
        finally:
            if more:
                self._cores.release(more)


class DeviceWorkerSlot:
    """A device that runs one batch after another."""

    count = 1
    shared = False

    def enter(self) -> None:
        """Do nothing."""

    def claim(self, *, wait: bool) -> bool:
        """Only the worker, which waits, may drive it."""
        return wait

    def release(self) -> None:
        """Do nothing."""

    def free(self) -> int:
        """0: a device has one slot."""
        return 0

    @contextmanager
    def running(self, tokens: int, *, alone: bool) -> Iterator[None]:
        """Change nothing."""
        yield
