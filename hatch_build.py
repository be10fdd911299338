"""Builds the compiled kernels into the package where there is a C++ compiler; elsewhere the package is pure.

Run by hatchling for wheels and editable installs. ``CXX`` names the compiler, ``MILLPOND_NATIVE=0`` leaves
the kernel out and ``=1`` makes their absence an error, as releases want it.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("src/millpond/native")
_LIBRARY = _FOLDER / "libmillpond.so"
_OPTIONS = "-O3 -std=c++17 -fPIC -shared -fno-exceptions -fno-rtti -fno-math-errno".split()


class KernelsBuildHook(BuildHookInterface[Any]):
    """One library, called through ctypes: it fits every Python of its platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as one for this platform."""
        wanted = os.environ.get("MILLPOND_NATIVE", "").strip()
        library = Path(self.root) / _LIBRARY
        problem = "switched off" if wanted == "0" else _compile(library)
        if problem is None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"].append(f"/{_LIBRARY.as_posix()}")
            return
        if wanted == "1":
            raise RuntimeError(f"the compiled kernels could not be built: {problem}")
        if wanted != "0":
            _remove(library)  # one of an earlier source
        self.app.display_warning(f"millpond without its compiled kernels: {problem}")


def _compile(library: Path) -> str | None:
    """Build ``library``; what stood in the way, if anything did."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is written for x86-64 under Linux, not for {platform.machine()} under {sys.platform}"
    named = os.environ.get("CXX")
    compiler = (
        shlex.split(named) if named else [found for name in ("g++", "clang++") if (found := shutil.which(name))][:1]
    )
    if not compiler:
        return "there is no C++ compiler"
    sources = [f"-DMILLPOND_SOURCES={_sources(library.parent)}ull"]
    sources += [str(source) for source in sorted(library.parent.glob("*.cpp"))]
    beside = library.with_suffix(f".{os.getpid()}.so")  # a process that has the old one mapped keeps it whole
    try:
        done = subprocess.run([*compiler, *_OPTIONS, "-o", str(beside), *sources], capture_output=True, text=True)
        if done.returncode != 0:
            return f"{compiler[0]} said: {done.stderr.strip().splitlines()[:1]}"
        beside.replace(library)
    except OSError as error:
        return str(error)
    finally:
        _remove(beside)
    return None


def _remove(path: Path) -> None:
    with suppress(OSError):  # a read-only tree
        path.unlink(missing_ok=True)


def _sources(folder: Path) -> int:
    """What library.py will compare."""
    spec = spec_from_file_location("library", folder / "library.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return int(module.sources())
