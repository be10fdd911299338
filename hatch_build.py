"""Builds the compiled kernels into the package if there is a C++ compiler; without one the package is pure Python.

hatchling runs it for wheels and editable installs. ``CXX`` names the compiler. ``MILLPOND_NATIVE=0`` leaves the kernels
out, and ``MILLPOND_NATIVE=1`` makes it an error if they cannot be built, which releases require.
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
    """One library, loaded with ctypes: it serves every Python version of its platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, and tag the wheel for this platform."""
        setting = os.environ.get("MILLPOND_NATIVE", "").strip()
        library = Path(self.root) / _LIBRARY
        problem = "switched off" if setting == "0" else _compile(library)
        if problem is None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"].append(f"/{_LIBRARY.as_posix()}")
            return
        if setting == "1":
            raise RuntimeError(f"the compiled kernels could not be built: {problem}")
        if setting != "0":
            _remove(library)  # built from earlier sources
        self.app.display_warning(f"millpond without its compiled kernels: {problem}")


def _compile(library: Path) -> str | None:
    """Build ``library``; returns why it could not be built, or ``None``."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is written for x86-64 under Linux, not for {platform.machine()} under {sys.platform}"
    cxx = os.environ.get("CXX")
    compiler = shlex.split(cxx) if cxx else [path for name in ("g++", "clang++") if (path := shutil.which(name))][:1]
    if not compiler:
        return "there is no C++ compiler"
    sources = [f"-DMILLPOND_SOURCE_HASH={_source_hash(library.parent)}ull"]
    sources += [str(source) for source in sorted(library.parent.glob("*.cpp"))]
    # Built under another name and then renamed: a process that has the old library mapped keeps it.
    draft = library.with_suffix(f".{os.getpid()}.so")
    try:
        done = subprocess.run([*compiler, *_OPTIONS, "-o", str(draft), *sources], capture_output=True, text=True)
        if done.returncode != 0:
            return f"{compiler[0]} said: {done.stderr.strip().splitlines()[:1]}"
        draft.replace(library)
    except OSError as error:
        return str(error)
    finally:
        _remove(draft)
    return None


def _remove(path: Path) -> None:
    with suppress(OSError):  # the tree may be read-only
        path.unlink(missing_ok=True)


def _source_hash(folder: Path) -> int:
    """The hash that library.py compares when it loads the kernels."""
    spec = spec_from_file_location("library", folder / "library.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return int(module.source_hash())
