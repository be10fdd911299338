"""Builds the compiled kernels into the package if there is a C++ compiler; without one the package is pure Python.

hatchling runs it for wheels and editable installs. ``CXX`` names the compiler, and ``LDCXXSHARED`` the command that
links, if it is another one. ``MILLPOND_NATIVE=0`` leaves the kernels out: the wheel is pure (``py3-none-any``), for
every platform. ``MILLPOND_NATIVE=1`` makes it an error if they cannot be built, which releases require. Otherwise the
wheel has the tag of this machine (``py3-none-linux_x86_64``), until ``auditwheel repair`` has checked which versions
of glibc it runs on.

The sources are those of the processor that the compiler compiles for. To build for another one than this machine's,
``CXX`` names a compiler that does, and ``_PYTHON_HOST_PLATFORM`` the platform of the tag, as for other packages::

    CXX="python -m ziglang c++ -target aarch64-linux-gnu.2.28" _PYTHON_HOST_PLATFORM=linux-aarch64
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
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
# By the macro of a system that the kernels are written for. Some compilers name libstdc++ and libm in every library;
# these kernels need only libc.
_LINK_OPTIONS = {"__linux__": ("-pthread", "-Wl,--as-needed"), "__APPLE__": ()}


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
            # A Python for both kinds of Macs; the library is for ARM.
            platform = sysconfig.get_platform().replace("universal2", "arm64")
            build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"
            build_data["artifacts"].append(f"/{_LIBRARY.as_posix()}")
            return
        if setting == "1":
            raise RuntimeError(f"the compiled kernels could not be built: {problem}")
        if setting != "0":
            _remove(library)  # built from earlier sources
        self.app.display_warning(f"millpond without its compiled kernels: {problem}")


def _compile(library: Path) -> str | None:
    """Build ``library``; returns why it could not be built, or ``None``."""
    cxx = os.environ.get("CXX")
    compiler = shlex.split(cxx) if cxx else [path for name in ("g++", "clang++") if (path := shutil.which(name))][:1]
    if not compiler:
        return "there is no C++ compiler"
    try:
        macros = _macros(compiler)
    except OSError as error:
        return str(error)
    system = next((macro for macro in _LINK_OPTIONS if macro in macros), None)
    if system is None or _family(library.parent, macros) is None or macros >= {"__APPLE__", "__x86_64__"}:
        return "it is written for x86-64 and ARM under Linux, and for ARM under macOS: not for what this compiler makes"
    # Built under another name and then renamed: a process that has the old library mapped keeps it.
    draft = library.with_suffix(f".{os.getpid()}.so")
    try:
        with TemporaryDirectory() as folder:
            objects, problem = compile_objects(compiler, library.parent, Path(folder))
            if problem is not None:
                return problem
            linker = shlex.split(os.environ.get("LDCXXSHARED", "")) or [*compiler, "-shared"]
            problem = _problem([*linker, *_LINK_OPTIONS[system], "-o", str(draft), *map(str, objects)])
            if problem is not None:
                return problem
        draft.replace(library)
    except OSError as error:
        return str(error)
    finally:
        _remove(draft)
    return None


def compile_objects(compiler: list[str], native: Path, folder: Path) -> tuple[list[Path], str | None]:
    """Compile the sources of ``native`` into ``folder``; returns the objects, and why one could not be compiled.

    A source whose instruction set the compiler does not know is left out: the library has no kernels for it then.
    """
    source_hash = f"-DMILLPOND_SOURCE_HASH={_library(native).source_hash()}ull"
    sources = sources_of(compiler, native)
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


def sources_of(compiler: list[str], native: Path) -> list[Path]:
    """The sources that a compiler is for: those of its processor, and those of all."""
    families, own = _library(native).FAMILIES.values(), _family(native, _macros(compiler))
    others = tuple(f"{family}_" for family in families if family != own)
    return sorted(path for path in native.rglob("*.cpp") if not path.parent.name.startswith(others))


def compiler_flags(source: Path) -> list[str]:
    """The flags of a source's instruction set; none if it runs on any processor."""
    row = _instruction_set(source)
    return [] if row is None else [*row.flags]


def _instruction_set(source: Path) -> Any:
    """The row of isas.h for the folder of a source; ``None`` if it has none."""
    family, _, name = source.parent.name.partition("_")
    rows = _library(source.parents[1]).instruction_sets(family) if name else ()
    return next((row for row in rows if row.name == name), None)


def _family(native: Path, macros: set[str]) -> str | None:
    """The family of processors that a compiler compiles for; ``None`` if there are no sources for it."""
    return next((family for macro, family in _library(native).FAMILIES.items() if macro in macros), None)


def _macros(compiler: list[str]) -> set[str]:
    """The names that a compiler defines: among them the processor and the system that it compiles for.

    Raises:
        OSError: It does not run.
    """
    done = subprocess.run([*compiler, "-dM", "-E", "-x", "c++", "-"], input="", capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(_said(compiler, done.stderr))
    return {line.split()[1].partition("(")[0] for line in done.stdout.splitlines() if line.startswith("#define ")}


def _knows(compiler: list[str], flags: list[str], instruction: str) -> bool:
    """Whether compiler and assembler know these flags and this instruction."""
    probe = f'void probe(void) {{ __asm__ volatile("{instruction}"); }}'
    return _problem([*compiler, *flags, "-x", "c++", "-c", "-o", os.devnull, "-"], probe) is None


def _problem(command: list[str], text: str = "") -> str | None:
    """Why a compiler's command failed; ``None`` if it did not."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return None if done.returncode == 0 else _said(command, done.stderr)


def _said(command: list[str], text: str) -> str:
    return f"{command[0]} said: {text.strip().splitlines()[:1]}"


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
