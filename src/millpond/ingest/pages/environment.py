"""The processor and the versions that figures were measured with."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from millpond.ingest.sinks.database import sink_packages

_PACKAGES = ("millpond", "torch", "transformers", "numpy", "ray")


def processor() -> str:
    """The processor's product name, which ``platform`` does not return on Linux."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, str]:
    """Processor, cores that this process may use, system and versions of the installed packages."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "processor": f"{processor()}, {cores} cores",
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")  # not imported for this alone
    if torch is not None and torch.cuda.is_available():
        facts["accelerator"] = torch.cuda.get_device_name()
    return facts | versions((*_PACKAGES, *sink_packages()))


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
