"""The kernels' sources compile without a warning, in every compiler of this machine that is new enough."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src/millpond/native"
NAMES = ("g++", "clang++", *(f"g++-{n}" for n in range(11, 20)), *(f"clang++-{n}" for n in range(14, 24)))
COMPILERS = [name for name in NAMES if shutil.which(name)]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux") or os.uname().machine != "x86_64", reason="x86-64")


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("hatchling")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        import hatch_build

        yield hatch_build


def options_of(compiler):
    """What makes warnings errors; ``None`` for a compiler that is too old."""
    banner = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    version = int(re.search(r"(\d+)\.\d+\.\d+", banner)[1])
    strict = ["-Wall", "-Wextra", "-Werror"]
    if "clang" in banner:
        return strict if version >= 14 else None
    # GCC's own avx512fintrin.h initializes undefined vectors with themselves, and is warned about where it is inlined.
    return [*strict, "-Wno-uninitialized", "-Wno-maybe-uninitialized"] if version >= 11 else None


def problems(hook, compiler, *options, folder=None):
    """What a compiler says about each source."""
    strict = options_of(compiler)
    if strict is None:
        pytest.skip(f"{compiler} is too old")

    def compiled(source):
        target = os.devnull if folder is None else folder / f"{'.'.join(source.relative_to(NATIVE).parts)}.o"
        command = [
            compiler,
            *hook._OPTIONS,
            *strict,
            *options,
            *hook.compiler_flags(source),
            "-c",
            "-o",
            target,
            source,
        ]
        return subprocess.run(command, capture_output=True, text=True).stderr

    sources = hook.sources_of([compiler], NATIVE)
    assert len(sources) > 10
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = zip(sources, pool.map(compiled, sources), strict=True)
        return {source.relative_to(NATIVE).as_posix(): text[:1000] for source, text in said if text}


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS[:1])
def test_the_syntax_gives_no_warning(hook, compiler):
    assert problems(hook, compiler, "-fsyntax-only") == {}


@pytest.mark.slow  # compiles every source
@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_compiler_warns(hook, compiler, tmp_path):
    """With all optimizations, which find more to warn of; and no code can be merged between instruction sets."""
    assert problems(hook, compiler, folder=tmp_path) == {}
    if shutil.which("nm"):
        for path in tmp_path.glob("*.o"):
            run = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True)
            weak = re.findall(r"^\w+ [WVu] (.*)$", run.stdout, re.MULTILINE)
            # What fills the table is weak where the table is, which then knows what the compiler left out.
            assert [name for name in weak if not name.startswith("millpond_add_")] == [], path.name
