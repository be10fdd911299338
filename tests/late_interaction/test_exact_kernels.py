"""Packed rows and exact MaxSim of every codec and instruction set, against numpy in float64."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from millpond import Ragged
from millpond.errors import InvalidRequestError
from millpond.late_interaction.codecs import rows as codecs
from millpond.late_interaction.codecs.rows import BFLOAT16, FLOAT32, INT8
from millpond.late_interaction.kernels import compiled, exact
from millpond.late_interaction.kernels.exact import DeviceTokens, Tokens, score
from millpond.native.library import ISAS, KernelTable, isa, kernel_table

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src/millpond/native"
WIDTHS = [1, 7, 48, 96, 128, 384, 1024]
DOCUMENTS = [0, 1, 31, 32, 33, 0, 1, 2, 200, 0, 48, 49, 1, 1, 96, 0]
QUERIES = [[0, 1, 32, 33, 100], [5], [16, 17], [3] * 40, [255, 2, 256, 257, 600, 1], [0]]
CODECS = [pytest.param(codec, id=codec.name) for codec in (INT8, BFLOAT16, FLOAT32)]
# Every width, with codecs in turn; every pair is tried nightly.
PAIRS = {(codec.name, width): (codec, width) for codec in (INT8, BFLOAT16, FLOAT32) for width in WIDTHS}
FAST = {(("int8", "bfloat16", "float32")[place % 3], width) for place, width in enumerate(WIDTHS)}
has_gcc = shutil.which("g++") is not None


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """The kernels for AMX over the emulated tile instructions, in a library of their own."""
    pytest.importorskip("hatchling")
    if not has_gcc or isa() not in ISAS[2:]:
        pytest.skip("needs g++ and a processor with AVX512-BF16")
    sys.path.insert(0, str(ROOT))
    import hatch_build

    folder = tmp_path_factory.mktemp("amx")
    source = NATIVE / "x86_amx/kernels.cpp"
    fill = folder / "fill.cpp"
    fill.write_text(
        f'#include "{source}"\n#include "{NATIVE}/parallel.cpp"\n'
        'extern "C" void fill(KernelTable* table) { millpond_add_amx(table); }\n'
    )
    emulation = ROOT / "tests/native/amx_emulation.h"
    options = [*hatch_build._OPTIONS, *hatch_build.compiler_flags(source), "-include", str(emulation), "-shared"]
    made = folder / "emulated.so"
    subprocess.run(["g++", *options, "-o", made, fill], check=True)
    table = KernelTable()
    ctypes.CDLL(str(made)).fill(ctypes.byref(table))
    lower = kernel_table("avx512bf16")
    for name, _ in KernelTable._fields_:
        if not getattr(table, name):
            setattr(table, name, getattr(lower, name))
    return table


def slow_unless(fast, param, **options):
    return pytest.param(*param, marks=() if fast else pytest.mark.slow, **options)


@pytest.fixture(params=[*(slow_unless(name in (isa(), "torch"), [name]) for name in (*ISAS, "amx emulated", "torch"))])
def table(request, monkeypatch):
    """The functions of one instruction set; ``None``: torch computes."""
    if request.param == "torch":
        chosen = None
    elif request.param == "amx emulated":
        chosen = request.getfixturevalue("emulated")
    elif isa() is None or ISAS.index(request.param) > ISAS.index(isa()):
        pytest.skip(f"this processor, or this build, has no {request.param}")
    else:
        chosen = kernel_table(request.param)
    monkeypatch.setattr(compiled, "kernel_table", lambda: chosen)
    return chosen


def ragged(lengths, width, seed=0):
    """Matrices with these numbers of rows, of length 1."""
    flat = np.random.default_rng(seed).standard_normal((sum(lengths), width)).astype(np.float32)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    return Ragged(flat=flat, offsets=np.cumsum([0, *lengths]).astype(np.int64))


def packed(documents, codec):
    rows, scales = codec.pack(documents.flat)
    return Tokens(codec=codec, rows=rows, scales=scales, offsets=documents.offsets)


def rounded_queries(flat, codec):
    """Query tokens as the kernels round them, in float64."""
    if codec is FLOAT32:
        return flat.astype(np.float64)
    if codec is BFLOAT16:
        return torch.from_numpy(flat).bfloat16().double().numpy()
    scales = np.abs(flat).max(axis=1, keepdims=True, initial=0) / np.float32(127)
    return np.rint(flat / np.where(scales > 0, scales, 1)).astype(np.float64) * scales


def expected(queries, tokens):
    """The definition, in float64, over the rows that are stored."""
    width = queries.flat.shape[1]
    rows = tokens.codec.unpack(tokens.rows, tokens.scales, width).astype(np.float64)
    flat = rounded_queries(queries.flat, tokens.codec)
    scores = np.zeros((len(queries), len(tokens)))
    for i in range(len(queries)):
        query = flat[queries.offsets[i] : queries.offsets[i + 1]]
        for j in range(len(tokens)):
            similarities = query @ rows[tokens.offsets[j] : tokens.offsets[j + 1]].T
            scores[i, j] = similarities.max(axis=1, initial=-np.inf).sum() if len(query) else 0
    return scores


def assert_scores(scores, wanted, queries):
    assert scores.dtype == np.float32
    assert scores.shape == wanted.shape
    empty = np.isinf(wanted)
    np.testing.assert_array_equal(scores[empty], wanted[empty])
    # Per query token: float32 sums of rows of length 1.
    tolerance = 2e-6 * np.maximum(1, queries.lengths)[:, None] + np.zeros_like(wanted)
    error = np.abs(np.where(empty, 0, scores) - np.where(empty, 0, wanted))
    assert (error <= tolerance).all(), error.max()


@pytest.mark.parametrize(
    ("codec", "width"), [slow_unless(pair in FAST, PAIRS[pair], id=f"{pair[0]}-{pair[1]}") for pair in PAIRS]
)
def test_scores_equal_the_definition(table, codec, width):
    documents = packed(ragged(DOCUMENTS, width, seed=1), codec)
    for lengths in QUERIES if width <= 128 else QUERIES[:2]:
        queries = ragged(lengths, width)
        wanted = expected(queries, documents)
        if codec is BFLOAT16 and table is not None:  # the processor adds pairs of products with another rounding
            wanted = wanted.astype(np.float32)
        assert_scores(score(queries, documents, threads=1), wanted, queries)


@pytest.mark.parametrize("codec", CODECS)
def test_a_query_alone_scores_as_among_others(table, codec):
    """To the bit: neither other queries nor their number change a score."""
    documents = packed(ragged(DOCUMENTS, 96, seed=1), codec)
    queries = ragged([3, 30, 7, 250, 300, 1, 16], 96)
    together = score(queries, documents, threads=1)
    for i, query in enumerate(queries):
        alone = score(Ragged.from_matrices([query], width=96), documents, threads=1)
        if table is None:
            np.testing.assert_allclose(alone[0], together[i], rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(alone[0], together[i])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_threads_and_long_documents_change_nothing(table, codec, threads, monkeypatch):
    documents = packed(ragged([8192, 1, 0, 3000, 32, 5000], 24, seed=1), codec)
    queries = ragged([32, 7], 24)
    scores = score(queries, documents, threads=threads)
    assert_scores(scores, expected(queries, documents), queries)
    np.testing.assert_array_equal(scores, score(queries, documents, threads=1))


def test_work_that_is_worth_threads_is_divided(table):
    """Enough products for three threads: two documents of each chunk size, and many small ones."""
    documents = packed(ragged([5000, 1, 20000, 3] + [40] * 2000, 64, seed=1), INT8)
    queries = ragged([32] * 4, 64)
    np.testing.assert_array_equal(score(queries, documents, threads=3), score(queries, documents, threads=1))


@pytest.mark.parametrize("codec", CODECS)
def test_chosen_documents_score_as_among_all(table, codec):
    """In any order, repeated, empty ones too, with more or fewer rows than a block."""
    documents = packed(ragged(DOCUMENTS, 48, seed=1), codec)
    queries = ragged([0, 9, 40], 48)
    everything = score(queries, documents)
    generator = np.random.default_rng(3)
    for chosen in ([], [5], [8, 8, 8], [15, 0], generator.integers(0, len(documents), 300), range(len(documents))):
        scores = score(queries, documents, documents=chosen)
        if table is None:
            np.testing.assert_allclose(scores, everything[:, list(chosen)], rtol=1e-5)
        else:
            np.testing.assert_array_equal(scores, everything[:, list(chosen)])


@pytest.mark.parametrize("codec", CODECS)
def test_memory_mapped_rows(table, codec, tmp_path):
    """Read-only files, with documents that begin in the middle of them and rows behind the last one."""
    original = packed(ragged(DOCUMENTS, 40, seed=1), codec)
    arrays = {}
    for name in ("rows", "scales", "offsets"):
        array = getattr(original, name)
        if array is not None:
            np.save(tmp_path / f"{name}.npy", array)
            arrays[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    mapped = Tokens(codec=codec, rows=arrays["rows"], scales=arrays.get("scales"), offsets=arrays["offsets"])
    queries = ragged([5, 33], 40)
    whole = score(queries, original)
    np.testing.assert_array_equal(score(queries, mapped), whole)
    part = Tokens(codec=codec, rows=mapped.rows, scales=mapped.scales, offsets=mapped.offsets[3:12])
    np.testing.assert_allclose(score(queries, part), whole[:, 3:11], rtol=1e-6)


def test_rows_with_gaps_between_them(table):
    wide = ragged(DOCUMENTS, 64, seed=1)
    queries = ragged([5, 33], 24)
    gaps = Tokens(codec=FLOAT32, rows=wide.flat[:, 8:32], scales=None, offsets=wide.offsets)
    dense = Tokens(codec=FLOAT32, rows=wide.flat[:, 8:32].copy(), scales=None, offsets=wide.offsets)
    np.testing.assert_array_equal(score(queries, gaps), score(queries, dense))


@pytest.mark.parametrize("codec", CODECS)
def test_a_nan_stays_visible_in_its_document_and_query(table, codec):
    documents, queries = ragged([40, 3, 100, 2], 32, seed=1), ragged([20, 4, 33], 32)
    documents.flat[90, 5] = np.nan  # in document 2, neither first nor last
    queries.flat[22, 0] = np.nan  # in query 1
    scores = score(queries, packed(documents, codec))
    assert np.isnan(scores[:, 2]).all() and np.isnan(scores[1]).all()
    assert np.isfinite(scores[[0, 2]][:, [0, 1, 3]]).all()


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_zeros_and_of_any_size(table, codec):
    documents, queries = ragged([3, 4, 5], 32, seed=1), ragged([6, 2], 32)
    documents.flat[3:7] = 0
    documents.flat[7:] *= 1e-6
    queries.flat[0] = 0
    tokens = packed(documents, codec)
    scores = score(queries, tokens)
    np.testing.assert_array_equal(scores[:, 1], 0)
    assert_scores(scores, expected(queries, tokens), queries)
    if codec is not INT8:
        large = packed(Ragged(flat=documents.flat * 1e30, offsets=documents.offsets), codec)
        np.testing.assert_allclose(score(queries, large), expected(queries, large), rtol=1e-2)


def test_int8_is_exact_at_its_largest_sums(table):
    """1,024 products of 127 and -127: what saturating instructions would get wrong."""
    flat = np.ones((4, 1024), dtype=np.float32)
    flat[1], flat[2, ::2] = -1, -1
    documents = packed(Ragged(flat=flat, offsets=np.arange(5, dtype=np.int64)), INT8)
    scores = score(Ragged(flat=flat, offsets=np.array([0, 1, 2, 3, 4])), documents)
    step = np.float32(1) / np.float32(127) * np.float32(np.float16(1 / 127)) * 127 * 127
    np.testing.assert_allclose(scores, flat @ flat.T * step, rtol=1e-6, atol=1e-9)


def test_no_query_and_no_document(table):
    nothing = ragged([], 16)
    documents, queries = packed(ragged([3, 0], 16), INT8), ragged([2], 16)
    assert score(nothing, documents).shape == (0, 2)
    assert score(queries, packed(nothing, INT8)).shape == (1, 0)
    assert score(queries, packed(ragged([0, 0], 16), INT8)).tolist() == [[-np.inf, -np.inf]]
    flat = np.zeros((3, 0), dtype=np.float32)
    widthless = Ragged(flat=flat, offsets=np.array([0, 1, 3]))
    assert score(widthless, packed(widthless, FLOAT32)).tolist() == [[0, 0], [0, 0]]


# --- Packing ----------------------------------------------------------------------------------------------------------


def numbers():
    """Rows of every kind: ordinary, tiny, huge, zeros, one number, halves that are rounded to even."""
    rows = np.random.default_rng(5).standard_normal((60, 13)).astype(np.float32)
    rows[10:20] *= np.logspace(-12, 6, 10, dtype=np.float32)[:, None]
    rows[20] = 0
    rows[21] = 0
    rows[21, 4] = -1e-30
    rows[22] = np.arange(13) * 12.7 - 76.2
    rows[23] = np.linspace(-127, 127, 13) + np.float32(0.5)
    rows[24, 2] = -np.inf
    rows[25, 2] = np.nan
    rows[26] = np.finfo(np.float32).smallest_subnormal
    return rows


def test_packed_rows_have_the_same_bits_everywhere(table, monkeypatch):
    for codec in (INT8, BFLOAT16):
        rows, scales = codec.pack(numbers())
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "kernel_table", lambda: None)
            by_torch, scales_by_torch = codec.pack(numbers())
        finite = np.isfinite(numbers()).all(axis=1)
        np.testing.assert_array_equal(rows[finite], by_torch[finite])
        if scales is not None:
            np.testing.assert_array_equal(scales, scales_by_torch)
            assert np.isnan(scales[~finite]).all() and not rows[~finite].any()


def test_a_packed_number_is_off_by_half_a_step_at_most(table):
    rows = numbers()[:20]
    integers, scales = INT8.pack(rows)
    assert integers.shape == (20, 16) and not integers[:, 13:].any()
    assert np.abs(integers.astype(int)).max() == 127
    unpacked = INT8.unpack(integers, scales, 13)
    assert (np.abs(unpacked - rows) <= 0.501 * scales.astype(np.float32)[:, None]).all()
    halves, none = BFLOAT16.pack(rows)
    assert none is None and halves.shape == (20, 14)
    np.testing.assert_array_equal(BFLOAT16.unpack(halves, None, 13), torch.from_numpy(rows).bfloat16().float().numpy())
    same, none = FLOAT32.pack(rows)
    assert none is None and same is rows


def test_rows_begin_at_a_cache_line():
    assert all(INT8.pack(np.ones((n, 64), np.float32))[0].ctypes.data % 64 == 0 for n in (1, 100, 100_000))


def test_numbers_that_int8_cannot_hold_are_refused(table):
    with pytest.raises(
        InvalidRequestError, match=r"has the number 1e\+07, and codec='int8' stores numbers up to 8.32e"
    ):
        INT8.pack(np.array([[1.0, -1e7]], dtype=np.float32))
    BFLOAT16.pack(np.array([[1.0, -1e7]], dtype=np.float32))


# --- Arguments --------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named():
    documents, queries = packed(ragged([3, 2], 16), INT8), ragged([2], 16)
    with pytest.raises(InvalidRequestError, match="queries are 8 wide, and the rows of the documents 16"):
        score(ragged([2], 8), documents)
    with pytest.raises(InvalidRequestError, match="index 2, and there are 2 documents"):
        score(queries, documents, documents=[0, 2])
    with pytest.raises(InvalidRequestError, match="index -1"):
        score(queries, documents, documents=[-1])
    with pytest.raises(InvalidRequestError, match="pass a list of indices"):
        score(queries, documents, documents=[0.5])
    with pytest.raises(InvalidRequestError, match="threads=0"):
        score(queries, documents, threads=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.zeros((4, 8), np.float32)}, "must be .tokens, width. of int8"),
        ({"rows": np.zeros((4, 7), np.int8)}, "a width that is a multiple of 4"),
        ({"scales": None}, "scales must be given for rows of int8"),
        ({"scales": np.zeros(3, np.float16)}, "scales must be float16 .4."),
        ({"offsets": np.array([0, 3, 2], np.int64)}, "must not decrease"),
        ({"offsets": np.array([0, 5], np.int64)}, "stay within 0 and 4"),
        ({"offsets": np.array([-1, 4], np.int64)}, "stay within 0 and 4"),
        ({"offsets": np.array([0, 4], np.int32)}, "offsets must be int64"),
    ],
    ids=["dtype", "width", "no scales", "few scales", "decreasing", "beyond", "negative", "int32"],
)
def test_arrays_that_do_not_go_together_are_refused(change, message):
    arrays = {"rows": np.zeros((4, 8), np.int8), "scales": np.zeros(4, np.float16), "offsets": np.array([0, 4])}
    with pytest.raises(ValueError, match=message):
        Tokens(codec=INT8, **{**arrays, **change})


def test_both_sides_agree_on_the_calls():
    """The structs of Python have the fields of those in C++, in the same order."""
    for call, header, struct in (
        (codecs._PackCall, "packing.h", "PackCall"),
        (exact._MaxSimCall, "maxsim.h", "MaxSimCall"),
    ):
        body = (NATIVE / header).read_text().partition(f"struct {struct} {{")[2].partition("};")[0]
        lines = [line.partition("//")[0].strip().rstrip(";") for line in body.splitlines()]
        names = [part.split()[-1].lstrip("*") for line in lines if line for part in line.split(",")]
        assert names == [name for name, _ in call._fields_]


def test_on_a_device_the_scores_are_the_same():
    """The operators that a GPU runs, here on the CPU."""
    queries = ragged([0, 5, 40], 24)
    for codec in (INT8, BFLOAT16, FLOAT32):
        tokens = packed(ragged(DOCUMENTS, 24, seed=1), codec)
        on_device = DeviceTokens.of(tokens, "cpu")
        np.testing.assert_allclose(exact.score_on_device(queries, on_device), score(queries, tokens), rtol=1e-4)
        chosen = [8, 0, 8, 3]
        np.testing.assert_allclose(
            exact.score_on_device(queries, on_device, documents=chosen),
            score(queries, tokens, documents=chosen),
            rtol=1e-4,
        )


# --- Memory and processes ---------------------------------------------------------------------------------------------

GUARDED = """
import ctypes, mmap, sys
sys.path[:0] = {path!r}
import numpy as np
from millpond.late_interaction.codecs.rows import BFLOAT16, FLOAT32, INT8
from millpond.late_interaction.kernels import compiled, exact
from millpond.native.library import KernelTable, kernel_table
from millpond.vectors.ragged import Ragged

keep = []

def guarded(array):
    # A copy that ends where a page begins that cannot be read.
    page = mmap.PAGESIZE
    room = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, room + page)
    keep.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + room), ctypes.c_size_t(page), 0) == 0
    copy = np.ndarray(array.shape, array.dtype, buffer=memory, offset=room - array.nbytes)
    copy[...] = array
    return copy

library, isa = {library!r}, {isa!r}
if library:
    table = KernelTable()
    ctypes.CDLL(library).fill(ctypes.byref(table))
    lower = kernel_table("avx512bf16")
    for name in ("maxsim_float32", "pack_int8", "pack_bfloat16"):
        setattr(table, name, getattr(lower, name))
else:
    table = kernel_table(isa)
compiled.kernel_table = lambda: table
generator = np.random.default_rng(0)
if {beyond}:
    rows = guarded(np.zeros((4, 64), np.int8))
    rows = np.ndarray((5, 64), np.int8, buffer=(ctypes.c_char * 320).from_address(rows.ctypes.data))
    tokens = exact.Tokens(codec=INT8, rows=rows, scales=np.zeros(5, np.float16), offsets=np.array([0, 5]))
    exact.score(Ragged(flat=np.zeros((1, 64), np.float32), offsets=np.array([0, 1])), tokens)
for codec in (INT8, BFLOAT16, FLOAT32):
    for width in (1, 7, 16, 48, 68, 96, 128, 200):
        for lengths in ([1], [31], [32], [48], [33, 0, 2], [100, 64, 5]):
            offsets = np.cumsum([0, *lengths]).astype(np.int64)
            flat = guarded(generator.standard_normal((offsets[-1], width)).astype(np.float32))
            rows, scales = codec.pack(flat)
            rows, scales = guarded(rows), None if scales is None else guarded(scales)
            tokens = exact.Tokens(codec=codec, rows=rows, scales=scales, offsets=guarded(offsets))
            queries = guarded(generator.standard_normal((37, width)).astype(np.float32))
            ragged = Ragged(flat=queries, offsets=guarded(np.array([0, 5, 37])))
            first = exact.score(ragged, tokens, threads=1)
            chosen = guarded(np.arange(len(tokens))[::-1].copy())
            assert np.array_equal(exact.score(ragged, tokens, documents=chosen), first[:, ::-1])
            keep_now, keep[:] = keep[:], []
            del rows, scales, tokens, queries, ragged, flat, chosen, offsets
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ISAS, "amx emulated"])
def test_nothing_is_read_outside_the_arrays(name, request):
    library = ""
    if name == "amx emulated":
        request.getfixturevalue("emulated")
        library = str(next(request.getfixturevalue("tmp_path_factory").getbasetemp().glob("amx*/emulated.so")))
    elif isa() is None or ISAS.index(name) > ISAS.index(isa()):
        pytest.skip(f"this processor, or this build, has no {name}")

    def run(*, beyond):
        code = GUARDED.format(path=sys.path, library=library, isa=name, beyond=beyond)
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)

    good = run(beyond=False)
    assert good.stdout == "done\n", (good.returncode, good.stderr)
    assert run(beyond=True).returncode == -11  # the guard works: a row too many is a segmentation fault


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_uses_threads_as_its_parent_did():
    documents = packed(ragged([40] * 3000, 64, seed=1), INT8)
    queries = ragged([32] * 2, 64)
    scores = score(queries, documents, threads=2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        equal = np.array_equal(score(queries, documents, threads=2), scores)
        os.write(writer, b"1" if equal else b"0")
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.waitpid(child, 0)
    os.close(reader)
