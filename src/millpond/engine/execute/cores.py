"""Cores: the processor cores that this process may use, shared by all of its engines.

A batch runs on cores that it has claimed here, so that ten engines that are busy at once compute on as many threads as
there are cores, not on ten times as many.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath


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


def usable(cgroup: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: those it may run on, within the time its control group grants.

    A container with a quota of two cores on a machine of 64 sees all 64 of them, and is stopped for most of every
    period if it runs on more than two.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _groups(cgroup, own) if (quota := _quota(group)) is not None]
    return max(1, min(cores, *(math.ceil(quota) for quota in quotas))) if quotas else cores


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """The folders of this process's control group and of all above it, whose limits hold as well, in both versions."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "0:cpu:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" or "cpu" in controllers.split(","):
            place = PurePosixPath(path.lstrip("/"))
            for part in (place, *place.parents):
                if ".." not in part.parts:
                    yield root / ("cpu" if controllers else "") / part


def _quota(group: Path) -> float | None:
    """Cores' worth of time that a control group grants, by version 2's file or version 1's; ``None`` is no limit."""
    try:
        limit, period = (group / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        granted = int((group / "cpu.cfs_quota_us").read_text())
        return None if granted <= 0 else granted / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


@cache
def _cores_of(pid: int) -> Cores:
    return Cores(usable())
