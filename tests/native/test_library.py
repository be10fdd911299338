"""The compiled library: its build, the instruction sets of its table, and its structs."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millpond.backends.native import structs
from millpond.backends.native.heads.kernels import GeluCall, ProductCall, VocabularyCall
from millpond.backends.torch.attention import matmul_attention, native
from millpond.backends.torch.attention.kernels import select
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.native import library as place
from millpond.native.library import ISAS, KernelTable, isa, kernel_table, library

# --- The table of late-interaction kernels: which instruction sets it has, and how their sources are built ------------


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
    # The encoder in bfloat16 needs instructions of its own, and has no kernels below them.
    below = min(highest, isa(), key=ISAS.index) in ("avx2", "avxvnni", "avx512")
    assert lacking <= ({"pack_rows_bfloat16"} if below else set())


@pytest.mark.contract
@built
@pytest.mark.parametrize("highest", ISAS)
def test_a_lower_instruction_set_can_be_forced(highest):
    expected = isa(highest)  # the best that this processor has: AVX512 without AVX-VNNI, say
    assert ISAS.index(expected) <= ISAS.index(highest)
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
    assert (
        message
        == "MILLPOND_ISA=sse2 is no instruction set and ignored; it may be avx2, avxvnni, avx512, avx512bf16, amx"
    )
    assert used == isa()


@pytest.mark.parametrize("family", ["x86", "arm"])
def test_every_row_has_a_folder_and_every_folder_a_row(family):
    folders = {source.parent.name for source in NATIVE.glob(f"{family}_*/*.cpp")}
    assert {row.folder for row in place.instruction_sets(family)} == folders
    assert ISAS in [tuple(row.name for row in place.instruction_sets(name)) for name in ("x86", "arm")]


@pytest.mark.contract
@pytest.mark.parametrize(("macro", "family"), [("__x86_64__", "x86"), ("__aarch64__", "arm"), ("__riscv", None)])
def test_the_sources_are_those_of_the_processor_that_the_compiler_compiles_for(hook, tmp_path, macro, family):
    compiler = tmp_path / "cxx"
    compiler.write_text(f'#!/bin/sh\necho "#define {macro} 1"\necho "#define __linux__ 1"\n')
    compiler.chmod(0o755)
    sources = hook.sources_of([str(compiler)], NATIVE)
    assert {source.parent.name.partition("_")[0] for source in sources} == {"native", "tokenize", family} - {None}


@pytest.mark.contract
def test_switched_off_there_is_no_table():
    assert told("print(place.kernel_table(), place.isa())", MILLPOND_NATIVE="0") == "None None"


def test_the_hash_covers_sources_and_headers_in_every_folder(sources, monkeypatch):
    monkeypatch.setattr(place, "LIBRARY", sources / "libmillpond.so")
    uncached = place.source_hash.__wrapped__
    before = uncached()
    hashes = {before}
    for source in sorted([*sources.rglob("*.cpp"), *sources.rglob("*.h")]):
        text = source.read_text()
        source.write_text(text + "\n")
        hashes.add(uncached())
        source.write_text(text)
    assert len(hashes) == 1 + len([*sources.rglob("*.cpp"), *sources.rglob("*.h")])
    assert uncached() == before


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


# --- The hook that builds the library, and processes that have none ---------------------------------------------------


served = pytest.mark.skipif(library() is None, reason="no compiled kernel: no C++ compiler, or no AVX512-BF16")


@pytest.fixture
def fresh():
    """Load the library again in this test, and once more after it."""

    def forget():
        library.cache_clear()
        place._load.cache_clear()

    forget()
    yield forget
    forget()


def test_without_the_library_other_kernels_serve_the_calls(fresh, monkeypatch, tmp_path):
    qkv = torch.zeros(3, 4, 2, 32, dtype=torch.bfloat16)
    monkeypatch.setattr(place, "LIBRARY", tmp_path / "none.so")
    assert library() is None
    assert native.unavailable() == "not built: there was no C++ compiler when millpond was installed"
    assert select(*qkv, Segments.of([4]), Masking(scale=1.0, causal=True)) is matmul_attention
    (tmp_path / "none.so").write_bytes(b"not a library")
    fresh()
    assert library() is None
    assert native.unavailable() == "the library cannot be loaded; install millpond again"


def test_it_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv("MILLPOND_NATIVE", "0")
    assert library() is None
    assert native.unavailable() == "switched off by MILLPOND_NATIVE=0"


@served
def test_a_library_of_another_version_is_left_alone(fresh, monkeypatch, caplog):
    monkeypatch.setattr(place, "source_hash", lambda: 1)
    assert library() is None
    assert "install millpond again" in caplog.text
    assert native.unavailable() == "built from other sources; install millpond again"


def build(tmp_path, monkeypatch, **environment):
    """Run the build hook over a copy of the sources; returns its build data, its warnings, and the library's path."""
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(str(ROOT))
    import hatch_build

    folder = tmp_path / "src/millpond/native"
    shutil.copytree(ROOT / "src/millpond/native", folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("CXX", "MILLPOND_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    warnings: list[str] = []

    class App:
        display_warning = staticmethod(warnings.append)

    hook = hatch_build.KernelsBuildHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel", App())
    data = {"artifacts": []}
    hook.initialize("standard", data)
    return data, warnings, folder / "libmillpond.so"


@pytest.mark.slow
@served
def test_the_hook_builds_a_wheel_of_this_platform(tmp_path, monkeypatch):
    data, warnings, made = build(tmp_path, monkeypatch)
    assert not warnings
    assert data["pure_python"] is False
    assert data["tag"] == "py3-none-linux_x86_64"
    assert data["artifacts"] == ["/src/millpond/native/libmillpond.so"]
    assert list(made.parent.glob("*.so")) == [made]
    assert ctypes.CDLL(str(made)).millpond_supported() == 1


def test_it_is_there_where_this_tree_has_one():
    """All tests of the kernels skip without the library; that must not hide one that does not load."""
    if os.environ.get("MILLPOND_NATIVE") == "0" or not Path(place.LIBRARY).exists():
        pytest.skip("switched off, or not built")
    if ctypes.CDLL(str(place.LIBRARY)).millpond_supported():
        assert library() is not None, "install millpond again: its kernels are of other sources"


@pytest.mark.contract
@served
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_the_library_needs_only_the_c_library():
    """torch's thread pool is a weak symbol, not a linked library."""
    listed = subprocess.run(["readelf", "-d", place.LIBRARY], capture_output=True, text=True, check=True).stdout
    assert [line.partition("[")[2] for line in listed.splitlines() if "NEEDED" in line] in (["libc.so.6]"], [])


@pytest.mark.contract
@served
def test_a_tree_that_cannot_be_written_gives_a_pure_package(tmp_path, monkeypatch):
    def refuse(self, *, missing_ok=False):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    data, warnings, _ = build(tmp_path, monkeypatch, CXX="false")
    assert len(warnings) == 1
    assert data == {"artifacts": []}


@pytest.mark.contract
@pytest.mark.parametrize("environment", [{"CXX": "/nowhere/c++"}, {"CXX": "false"}, {"MILLPOND_NATIVE": "0"}])
def test_without_a_compiler_the_package_is_pure(tmp_path, monkeypatch, environment):
    data, warnings, made = build(tmp_path, monkeypatch, **environment)
    assert len(warnings) == 1
    assert not made.exists()
    assert data == {"artifacts": []}


@pytest.mark.contract
def test_a_release_insists(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="could not be built"):
        build(tmp_path, monkeypatch, CXX="/nowhere/c++", MILLPOND_NATIVE="1")


@pytest.mark.contract
@served
def test_a_process_without_torchs_threads_can_load_it():
    """The thread pool is a weak symbol: without torch in the process, one thread does the work."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).millpond_supported())"
    run = subprocess.run([sys.executable, "-c", code, place.LIBRARY], capture_output=True, text=True)
    assert run.stdout.strip() == "1", run.stderr


# --- The structs that Python and the native encoder share: same fields, in the same order, of the same size -----------


HEADER = "".join((place.LIBRARY.parent / name).read_text() for name in ("encoder/plan.h", "heads/calls.h"))
STRUCTS = (
    *(structs.Weight, structs.NormWeights, structs.Step, structs.Model, structs.EncodeCall, structs.PackRowsCall),
    *(ProductCall, GeluCall, VocabularyCall),
)
TYPES = {ctypes.c_int64: "std::int64_t", ctypes.c_double: "double"}


def declared(name):
    """The fields of a struct of the headers: (name, type)."""
    body = re.search(rf"^struct {name} {{\n(.*?)^}};", HEADER, re.DOTALL | re.MULTILINE)[1]
    for statement in re.sub(r"//.*", "", body).split(";"):
        if statement.strip():
            kind, names = re.fullmatch(r"\s*(.*?[\s*])((?:\w+,\s*)*\w+)\s*", statement, re.DOTALL).groups()
            yield from ((field.strip(), kind.strip()) for field in names.split(","))


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_python_has_the_fields_of_the_header(struct):
    expected = list(declared(struct.__name__))
    assert [name.rstrip("_") for name, *_ in struct._fields_] == [name for name, _ in expected]
    for (name, kind, *_), (_, written) in zip(struct._fields_, expected, strict=True):
        pointer = kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer)
        assert ("*" in written) == pointer, name
        if kind in TYPES:
            assert written == TYPES[kind], name
        elif not pointer:
            assert written == kind.__name__, name


@pytest.mark.skipif(place.portable() is None, reason="no compiled kernels")
def test_both_sides_agree_on_the_sizes():
    sizes = (ctypes.c_int64 * len(STRUCTS))()
    place.portable().millpond_plan_bytes(sizes)
    assert list(sizes) == [ctypes.sizeof(struct) for struct in STRUCTS]


def test_every_struct_of_the_header_is_compared():
    assert set(re.findall(r"^struct (\w+) {", HEADER, re.MULTILINE)) == {struct.__name__ for struct in STRUCTS}


def test_the_numbers_of_kinds_are_those_of_the_header():
    names = {
        "StepKind": {key: value for key, value in vars(structs).items() if key in STEPS},
        "NormKind": {key: value for key, value in vars(structs).items() if key in NORMS},
        "Stored": {key: value for key, value in vars(structs).items() if key.startswith("STORED_")},
        "Reading": {key: value for key, value in vars(structs).items() if re.fullmatch(r"\w+_ROWS?", key)},
    }
    for enum, values in names.items():
        listed = [name.strip() for name in re.search(rf"enum {enum} : std::int64_t {{([^}}]*)}}", HEADER)[1].split(",")]
        constants = [re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("k")).upper() for name in listed]
        assert constants == sorted(values, key=values.get), enum
        assert sorted(values.values()) == list(range(len(listed))), enum
    activations = re.search(r"enum Activation : std::int64_t {([^}]*)}", HEADER)[1].split(",")
    assert set(structs.ACTIVATIONS.values()) == set(range(len(activations)))


NORMS = ("COPY", "LAYER_NORM", "RMS_NORM", "SCALE")
STEPS = (
    "EMBED",
    "NORM",
    "PRODUCT",
    "HEADS",
    "ATTENTION",
    "FEED",
    "ADAPT",
    "EXPERTS",
    "CONVOLVE",
    "KEEP",
    "GATE",
    "EXCLUDE",
    "BLEND",
)
