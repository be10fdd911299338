"""Lanes: where workers run their batches, and on how much of the machine.

On a CPU several workers run batches of their own side by side, each on a core that it has claimed: an operator that
runs on one thread ends in no barrier, and what one lane does in Python the other does not wait for. A batch that has
the machine for itself takes what is free. Any other device is one lane.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from millpond.engine.execute.cores import Cores
from millpond.engine.execute.threads import Threads, default_threads, on_threads

# More lanes than this win nothing: each of them has several threads then.
MOST_LANES = 8


class Lanes(Protocol):
    """What an engine's workers on one device share."""

    count: int  # workers
    shared: bool  # whether any thread may run a batch

    def enter(self) -> None:
        """Prepare the calling thread, a worker's, once."""
        ...

    def claim(self, *, wait: bool) -> bool:
        """Claim a lane for one batch; without ``wait`` only if one is free. Whether there was one."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...

    def free(self) -> int:
        """Lanes that could run a batch beside the claimed one."""
        ...

    @contextmanager
    def running(self, tokens: int, *, alone: bool) -> Iterator[None]:
        """Around a batch of a claimed lane; ``alone``: nothing else waits."""
        ...


class CpuLanes:
    """Cores of a CPU."""

    shared = True

    def __init__(self, threads: Threads, cores: Cores) -> None:
        self._threads = threads
        self._cores = cores
        self.count = max(1, min(threads.most, cores.count, MOST_LANES))

    def enter(self) -> None:
        """One thread, until a batch is worth more."""
        torch.set_num_threads(1)
        default_threads(self._threads.most)

    def claim(self, *, wait: bool) -> bool:
        """A core."""
        return self._cores.claim(wait=wait)

    def release(self) -> None:
        """The core."""
        self._cores.release()

    def free(self) -> int:
        """Cores that are free, for as many lanes as there are."""
        return min(self._cores.free, self.count - 1)

    @contextmanager
    def running(self, tokens: int, *, alone: bool) -> Iterator[None]:
        """As many threads as the batch is worth, if it is alone, and as there are free cores."""
        at_hand = threading.current_thread() is threading.main_thread()
        worth = self._threads.count(tokens, at_hand=at_hand)
        # Where lanes are fewer than cores, each has its part of them.
        part = max(1, self._threads.most // self.count)
        more = self._cores.widen((worth if alone else min(worth, part)) - 1)
        try:
            with on_threads(1 + more):
                if more and 1 + more != self._threads.most:
                    default_threads(self._threads.most)
                yield
        finally:
            if more:
                self._cores.release(more)
                if not at_hand:
                    default_threads(self._threads.most)


class DeviceLane:
    """A device that runs one batch after the other."""

    count = 1
    shared = False

    def enter(self) -> None:
        """Nothing to prepare."""

    def claim(self, *, wait: bool) -> bool:
        """Its worker alone drives it."""
        return wait

    def release(self) -> None:
        """Nothing was claimed."""

    def free(self) -> int:
        """There is no other."""
        return 0

    @contextmanager
    def running(self, tokens: int, *, alone: bool) -> Iterator[None]:
        """As it is."""
        yield
