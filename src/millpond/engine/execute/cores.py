"""Cores: the processor cores that this process may use, shared by all of its engines.

Ten engines that are busy at once compute on as many threads as there are cores, not on ten times as many.
"""

from __future__ import annotations

import os
import threading
from functools import cache

from millpond.support.processor import usable_cores


class Cores:
    """A number of cores to claim and release; thread-safe."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._lock = threading.RLock()
        self._released = threading.Condition(self._lock)

    @property
    def free(self) -> int:
        """Number of cores that are not claimed."""
        return self._free

    def claim(self, *, wait: bool = True) -> bool:
        """Claim a core, if one is free, or after a ``wait`` for one; returns whether it was claimed."""
        with self._lock:
            if wait and self._free <= 0:
                self._released.wait_for(lambda: self._free > 0)
            if self._free <= 0:
                return False
            self._free -= 1
            return True

    def widen(self, most: int) -> int:
        """Claim up to ``most`` more cores that are free now; returns their number."""
        if most <= 0:
            return 0
        with self._lock:
            more = max(0, min(most, self._free))
            self._free -= more
            return more

    def release(self, count: int = 1) -> None:
        """Give cores back."""
        with self._lock:
            self._free += count
            self._released.notify(count)


def process_cores() -> Cores:
    """The cores of this process; a forked child has its own count, without its parent's claims."""
    return _cores_of(os.getpid())


@cache
def _cores_of(pid: int) -> Cores:
    return Cores(usable_cores())
