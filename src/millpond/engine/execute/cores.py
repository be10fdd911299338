"""Cores: the processor cores that this process may use, shared by all of its engines.

Ten engines that are busy at once compute on as many threads as there are cores, not on ten times as many.
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


def usable(cgroup: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Number of cores that this process may use: its CPU affinity, within the quota of its control group.

    A container with a quota of two cores on a machine of 64 sees all 64, and is stopped for most of every period if it
    runs on more than two.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _groups(cgroup, own) if (quota := _quota(group)) is not None]
    return max(1, min(cores, *(math.ceil(quota) for quota in quotas))) if quotas else cores


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """The folders of this process's control group and of its parents, whose limits apply too; cgroup 1 and 2."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "0:cpu:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" or "cpu" in controllers.split(","):
            group = PurePosixPath(path.lstrip("/"))
            for folder in (group, *group.parents):
                if ".." not in folder.parts:
                    yield root / ("cpu" if controllers else "") / folder


def _quota(group: Path) -> float | None:
    """CPU quota of a control group in cores, from the file of cgroup 2 or 1; ``None``: no limit."""
    try:
        limit, period = (group / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


@cache
def _cores_of(pid: int) -> Cores:
    return Cores(usable())
