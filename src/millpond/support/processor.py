"""Processor: the cores that this process may use, and how many threads to compute on."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def default_threads() -> int:
    """Threads to compute on where none are named: torch's number where it is imported, else ``OMP_NUM_THREADS``.

    Without either, as many as there are usable cores.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):  # else another thread imports it
        return int(torch.get_num_threads())
    named = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a number for each level of nesting
    return int(named) if named.isdecimal() and int(named) else usable_cores()


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
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
