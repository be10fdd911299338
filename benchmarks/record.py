"""Results of a benchmark as JSON: the figures with the hardware, versions and commit that they were measured with.

Each kind of processor has its own folder in ``results/``, so that a run on one does not replace the figures of another.
"""

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

from processor import cores, effective_cap, kind, processor

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
    """Write ``results`` to ``{name}.json`` in the folder of this kind of machine in ``folder``, and return the path.

    An existing file of the same kind is replaced; the repository keeps the history.
    """
    content = described(name, results)
    return write(folder / kind(content["hardware"]) / f"{name}.json", content)


def recorded_here(name: str, *, folder: Path = RESULTS) -> dict[str, Any]:
    """The results that :func:`record` wrote last on this kind of machine; empty if there are none."""
    path = folder / kind(hardware()) / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else {}


def record_file(path: Path, results: dict[str, Any]) -> Path:
    """Write ``results`` to exactly ``path``: for results that hold several kinds of machines, and for chosen names."""
    return write(path, described(path.stem, results))


def described(name: str, results: dict[str, Any]) -> dict[str, Any]:
    """The content of a file: ``results`` with hardware, versions and commit."""
    return {
        "benchmark": name,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "results": results,
    }


def write(path: Path, content: dict[str, Any]) -> Path:
    """Write a file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def recorded(folder: Path = RESULTS) -> dict[str, list[dict[str, Any]]]:
    """All results in ``folder`` by name, one for each kind of machine; ``file`` is the path in ``folder``.

    Files directly in ``folder`` are from before there were folders of kinds; a file of the same kind replaces them.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in [*folder.glob("*.json"), *folder.glob("*/*.json")]:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["file"] = path.relative_to(folder).as_posix()
        found.setdefault(path.stem, {})[kind(content["hardware"])] = content
    return {name: [contents[key] for key in sorted(contents)] for name, contents in sorted(found.items())}


def hardware() -> dict[str, Any]:
    """Processor, the instruction set that millpond's kernels use, cores, memory in bytes, and an accelerator.

    The accelerator is only named if torch is loaded and sees one.
    """
    found: dict[str, Any] = {
        **processor(),
        "isa": _isa(),
        "architecture": platform.machine(),
        "cores": cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # if others ran, distrust the figures
    }
    if cap := effective_cap(os.environ.get("MILLPOND_ISA", ""), found["instruction_sets"]):
        found["cap"] = cap
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


def _isa() -> str | None:
    """The highest instruction set of millpond's compiled kernels under ``MILLPOND_ISA``; None without kernels."""
    try:
        from millpond.native.library import isa
    except ImportError:
        return None
    return isa()
