"""The table of late-interaction kernels: which instruction sets it has, and how their sources are built."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millpond.native import library as place
from millpond.native.library import ISAS, KernelTable, isa, kernel_table, library

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src/millpond/native"
built = pytest.mark.skipif(kernel_table() is None, reason="no compiled kernels: no C++ compiler, or no AVX2")
needs_gcc = pytest.mark.skipif(shutil.which("g++") is None or isa() is None, reason="needs g++ on x86-64 Linux")


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("hatchling")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        import hatch_build

        patch.delenv("CXX", raising=False)
        yield hatch_build


@pytest.fixture(scope="module")
def objects(hook, tmp_path_factory):
    """The compiled sources."""
    made, problem = hook.compile_objects(["g++"], NATIVE, tmp_path_factory.mktemp("objects"))
    assert problem is None
    return {path.name: path for path in made}


@pytest.fixture
def sources(tmp_path):
    """A copy of the sources."""
    return shutil.copytree(NATIVE, tmp_path / "native", ignore=shutil.ignore_patterns("*.so", "__pycache__"))


def told(code, **environment):
    """What a new process prints that loads the library with these variables."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; from millpond.native import library as place; {code}"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@built
def test_both_sides_agree_on_the_table():
    assert ctypes.sizeof(KernelTable) == place._load().millpond_kernel_table_bytes()


@built
@pytest.mark.parametrize("highest", ISAS)
def test_every_instruction_set_has_the_kernels_of_the_lower_ones(highest):
    table = kernel_table(highest)
    lacking = {name for name, _ in KernelTable._fields_ if name.startswith("pack") and not getattr(table, name)}
    # The encoder in bfloat16 and int8 needs instructions of its own, and bfloat16 has no kernels below them.
    beyond = {"avx2": {"pack_weight_bfloat16", "pack_weight_int8"}, "avx512": {"pack_weight_bfloat16"}}
    assert lacking <= beyond.get(min(highest, isa(), key=ISAS.index), set())


@pytest.mark.contract
@built
@pytest.mark.parametrize("highest", ISAS)
def test_a_lower_instruction_set_can_be_forced(highest):
    best = ISAS.index(isa())
    expected = ISAS[min(best, ISAS.index(highest))]
    encoder = library() is not None and highest in ("avx512bf16", "amx")
    code = "print(place.isa(), place.library() is not None, place.unavailable())"
    reason = f"AVX512-BF16 is switched off by MILLPOND_ISA={highest}"
    if library() is not None:
        assert told(code, MILLPOND_ISA=highest) == f"{expected} {encoder} {None if encoder else reason}"


@pytest.mark.contract
@built
def test_an_unknown_instruction_set_is_named_and_ignored():
    code = "import logging; logging.basicConfig(stream=sys.stdout, format='%(message)s'); print(place.isa())"
    message, used = told(code, MILLPOND_ISA="sse2").splitlines()
    assert message == "MILLPOND_ISA=sse2 is no instruction set and ignored; it may be avx2, avx512, avx512bf16, amx"
    assert used == isa()


@pytest.mark.contract
def test_switched_off_there_is_no_table():
    assert told("print(place.kernel_table(), place.isa())", MILLPOND_NATIVE="0") == "None None"


def test_the_hash_covers_sources_and_headers_in_every_folder(sources, monkeypatch):
    monkeypatch.setattr(place, "LIBRARY", sources / "libmillpond.so")
    before = place.source_hash()
    hashes = {before}
    for source in sorted([*sources.rglob("*.cpp"), *sources.rglob("*.h")]):
        text = source.read_text()
        source.write_text(text + "\n")
        hashes.add(place.source_hash())
        source.write_text(text)
    assert len(hashes) == 1 + len([*sources.rglob("*.cpp"), *sources.rglob("*.h")])
    assert place.source_hash() == before


def compiler(tmp_path, unknown):
    """A compiler that does not know the flags that contain ``unknown``."""
    script = tmp_path / "cxx"
    script.write_text(f'#!/bin/sh\ncase "$*" in *{unknown}*) echo "unknown option" >&2; exit 1;; esac\nexec g++ "$@"\n')
    script.chmod(0o755)
    return [str(script)]


@pytest.mark.slow
@needs_gcc
def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(hook, sources, tmp_path):
    for name in ("attention", "norm", "rotary"):
        (sources / f"{name}.cpp").unlink()
    made, problem = hook.compile_objects(compiler(tmp_path, "-mavx512f"), sources, tmp_path)
    assert problem is None
    names = {path.name for path in made}
    assert "x86_avx2.kernels.cpp.o" in names
    assert not {name for name in names if name.startswith(("x86_avx512", "x86_amx"))}
    library_path = tmp_path / "lesser.so"
    subprocess.run(["g++", "-shared", "-o", library_path, *made], check=True)
    table = KernelTable()
    assert ctypes.CDLL(str(library_path)).millpond_kernel_table(ctypes.byref(table), len(ISAS)) == 1
    assert table.pack_int8


@pytest.mark.contract
@needs_gcc
def test_a_mistake_in_the_source_of_an_instruction_set_is_an_error(hook, sources, tmp_path):
    source = sources / "x86_amx/kernels.cpp"
    for other in sources.rglob("*.cpp"):
        if other != source:
            other.unlink()
    source.write_text(source.read_text() + "mistake\n")
    _, problem = hook.compile_objects(["g++"], sources, tmp_path)
    assert problem is not None and "mistake" in problem


@needs_gcc
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.slow  # compiles every source
def test_no_code_of_an_instruction_set_can_be_merged_into_another(objects):
    """A weak symbol is an inline function or a template: the linker keeps the copy of any source."""
    expected = {f"x86_{name}.{source}.cpp.o" for name in ISAS for source in ("kernels", "encoder")}
    assert objects.keys() >= expected
    for path in objects.values():
        listed = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True).stdout
        weak = re.findall(r"^\w+ [WVuwv] (.*)$", listed, re.MULTILINE)
        assert [name for name in weak if not name.startswith("millpond_add_")] == [], path.name


@needs_gcc
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.slow  # compiles every source
def test_what_chooses_the_table_runs_on_any_processor(objects):
    used = ("x86_avx2.encoder.cpp.o", "x86_avx2.kernels.cpp.o")
    names = ("kernel_table.cpp.o", "processor.cpp.o", "parallel.cpp.o", *used)
    code = {
        name: subprocess.run(["objdump", "-d", objects[name]], capture_output=True, text=True, check=True).stdout
        for name in names
    }
    wide = re.compile(r"%[yz]mm|\tv[a-z]+ ")
    assert [name for name in names if wide.search(code[name])] == list(used)
