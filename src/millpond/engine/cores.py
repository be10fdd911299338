"""Cores: the processor cores that this process may use, shared by all of its engines.

A batch runs on cores that it has claimed here, so that ten engines that are busy at once compute on as many threads as
there are cores, not on ten times as many.
"""

from __future__ import annotations

import math
import os
import threading
from functools import cache
from pathlib import Path


class Cores:
    """A number of cores to claim and release; thread-safe."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._released = threading.Condition()

    @property
    def free(self) -> int:
        """Cores that nobody has claimed."""
        return self._free

    def claim(self, *, wait: bool = True) -> bool:
        """Claim a core; without ``wait`` only if one is free. Whether there was one."""
        with self._released:
            if wait:
                self._released.wait_for(lambda: self._free > 0)
            if self._free <= 0:
                return False
            self._free -= 1
            return True

    def widen(self, most: int) -> int:
        """Claim up to ``most`` more cores that are free now; returns how many."""
        with self._released:
            more = max(0, min(most, self._free))
            self._free -= more
            return more

    def release(self, count: int = 1) -> None:
        """Give cores back."""
        with self._released:
            self._free += count
            self._released.notify(count)


def process_cores() -> Cores:
    """The cores of this process; a forked child, whose parent's claims mean nothing to it, has its own count."""
    return _cores_of(os.getpid())


def usable(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: those it may run on, within the time its control group grants.

    A container with a quota of two cores on a machine of 64 sees all 64 of them, and is stopped for most of every
    period if it runs on more than two.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time that the control group grants, by version 2's file or version 1's; ``None`` is no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        granted = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        return None if granted <= 0 else granted / int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


@cache
def _cores_of(pid: int) -> Cores:
    return Cores(usable())
