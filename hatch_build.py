"""Builds the compiled kernels into the package if there is a C++ compiler; without one the package is pure Python.

hatchling runs it for wheels and editable installs. ``CXX`` names the compiler, and ``LDCXXSHARED`` the command that
links, if it is another one. ``MILLPOND_NATIVE=0`` leaves the kernels out: the wheel is pure (``py3-none-any``), for
every platform. ``MILLPOND_NATIVE=1`` makes it an error if they cannot be built, which releases require. Otherwise the
wheel has the tag of this machine (``py3-none-linux_x86_64``), until ``auditwheel repair`` has checked which versions
of glibc it runs on.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("src/millpond/native")
_LIBRARY = _FOLDER / "libmillpond.so"
_OPTIONS = "-O3 -std=c++17 -fPIC -fno-exceptions -fno-rtti -fno-math-errno".split()
# Some compilers name libstdc++ and libm in every library; these kernels need only libc.
_LINK_OPTIONS = ("-pthread", "-Wl,--as-needed")


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
    # Built under another name and then renamed: a process that has the old library mapped keeps it.
    draft = library.with_suffix(f".{os.getpid()}.so")
    try:
        with TemporaryDirectory() as folder:
            objects, problem = compile_objects(compiler, library.parent, Path(folder))
            if problem is not None:
                return problem
            linker = shlex.split(os.environ.get("LDCXXSHARED", "")) or [*compiler, "-shared"]
            problem = _problem([*linker, *_LINK_OPTIONS, "-o", str(draft), *map(str, objects)])
            if problem is not None:
                return problem
        draft.replace(library)
    except OSError as error:
        return str(error)
    finally:
        _remove(draft)
    return None


def compile_objects(compiler: list[str], native: Path, folder: Path) -> tuple[list[Path], str | None]:
    """Compile every source of ``native`` into ``folder``; returns the objects, and why one could not be compiled.

    A source whose instruction set the compiler does not know is left out: the library has no kernels for it then.
    """
    source_hash = f"-DMILLPOND_SOURCE_HASH={_library(native).source_hash()}ull"
    sources = sorted(native.rglob("*.cpp"))
    objects = [folder / f"{'.'.join(source.relative_to(native).parts)}.o" for source in sources]

    def compile_one(source: Path, target: Path) -> str | None:
        flags = compiler_flags(source)
        problem = _problem([*compiler, *_OPTIONS, *flags, source_hash, "-c", "-o", str(target), str(source)])
        if problem is not None and flags and not _knows(compiler, flags, _instruction_set(source).instruction):
            return None
        return problem

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(pool.map(compile_one, sources, objects))
    return [made for made in objects if made.is_file()], next(filter(None, problems), None)


def compiler_flags(source: Path) -> list[str]:
    """The flags of a source's instruction set; none if it runs on any processor."""
    row = _instruction_set(source)
    return [] if row is None else [*row.flags]


def _instruction_set(source: Path) -> Any:
    """The row of isas.h for the folder of a source; ``None`` if it has none."""
    rows = _library(source.parent.parent).INSTRUCTION_SETS if source.parent.name.startswith("x86_") else ()
    return next((row for row in rows if source.parent.name == f"x86_{row.name}"), None)


def _knows(compiler: list[str], flags: list[str], instruction: str) -> bool:
    """Whether compiler and assembler know these flags and this instruction."""
    probe = f'void probe(void) {{ __asm__ volatile("{instruction}"); }}'
    return _problem([*compiler, *flags, "-x", "c++", "-c", "-o", os.devnull, "-"], probe) is None


def _problem(command: list[str], text: str = "") -> str | None:
    """Why a compiler's command failed; ``None`` if it did not."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return None if done.returncode == 0 else f"{command[0]} said: {done.stderr.strip().splitlines()[:1]}"


def _remove(path: Path) -> None:
    with suppress(OSError):  # the tree may be read-only
        path.unlink(missing_ok=True)


def _library(folder: Path) -> Any:
    """The module library.py, which reads isas.h and computes the hash that it compares when it loads the kernels."""
    spec = spec_from_file_location("library", folder / "library.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
