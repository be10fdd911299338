"""Results of a benchmark as JSON: the figures with the hardware, versions and commit that they were measured with."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "millpond",
    "numpy",
    "torch",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "langchain-core",
    "llama-index-core",
    "qdrant-client",
    "pymilvus",
)


def record(name: str, results: dict[str, Any], *, folder: Path = RESULTS) -> Path:
    """Write ``results`` to ``{name}.json`` in ``folder`` with hardware, versions and commit, and return the path.

    An existing file is replaced; the repository keeps the history.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    content = {
        "benchmark": name,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "results": results,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, and the accelerator if torch is loaded and sees one."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # if others ran, distrust the figures
    }
    torch = sys.modules.get("torch")  # not imported for this alone
    if torch is not None and torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Versions of Python, sqlite and those of ``PACKAGES`` that are installed."""
    found = {"python": platform.python_version(), "system": platform.platform(), "sqlite": sqlite3.sqlite_version}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of this checkout, with ``+changes`` if tracked files differ from it; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        name = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    fields = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return fields[0] if fields else platform.processor()
