"""No step of the native encoder reads or writes beyond what it is given."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native.models import every_isa

ROOT = Path(__file__).parents[2]


def run(isa, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "tests.native.guarded", isa, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.contract
@every_isa
def test_nothing_is_touched_beyond_the_end_of_any_array(isa):
    """Ids, bounds, types, tables, weights, workspace and result end where a page begins that may not be touched."""
    done = run(isa, "pages")
    assert done.returncode == 0, done.stderr[-2000:] or -done.returncode
    assert done.stdout.endswith(" texts\n")


@pytest.mark.slow
@every_isa
def test_the_guard_ends_a_process_that_reads_beyond(isa):
    assert run(isa, "pages", "--beyond").returncode == -signal.SIGSEGV


def runtime(name):
    """The path of a sanitizer's library; ``None`` without it."""
    if shutil.which("g++") is None:
        return None
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return str(Path(found).resolve()) if os.path.isabs(found) else None


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The library, built with AddressSanitizer and the sanitizer of undefined behaviour."""
    if runtime("libasan.so") is None or runtime("libubsan.so") is None:
        pytest.skip("no sanitizers")
    pytest.importorskip("hatchling")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.delenv("CXX", raising=False)
        import hatch_build

        folder = tmp_path_factory.mktemp("sanitized") / "native"
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / "src/millpond/native", folder, ignore=ignored)
        options = [option for option in hatch_build._OPTIONS if option != "-O3"]
        flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
        patch.setattr(hatch_build, "_OPTIONS", ["-O1", "-g1", *options, *flags])
        linked = {system: (*options, *flags) for system, options in hatch_build._LINK_OPTIONS.items()}
        patch.setattr(hatch_build, "_LINK_OPTIONS", linked)
        made = folder / "libmillpond.so"
        problem = hatch_build._compile(made)
    assert problem is None
    return str(made)


@pytest.mark.slow  # compiles every source
@every_isa
def test_sanitizers_find_nothing(sanitized, isa):
    preload = f"{runtime('libasan.so')}:{runtime('libubsan.so')}"
    environment = {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = run(isa, "malloc", sanitized, **environment)
    assert done.returncode == 0, done.stderr[:3000]
    found = run(isa, "malloc", sanitized, "--beyond", **environment)
    assert found.returncode != 0 and "heap-buffer-overflow" in found.stderr, "the sanitizer did not watch"
