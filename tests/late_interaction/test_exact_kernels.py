"""Packed rows and exact MaxSim of every codec and instruction set, against numpy in float64."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.approximate_search import guarded

from millpond.errors import InvalidRequestError
from millpond.late_interaction import Ragged, maxsim
from millpond.late_interaction.codecs import residual
from millpond.late_interaction.codecs import rows as codecs
from millpond.late_interaction.codecs.rows import BFLOAT16, FLOAT32, INT8
from millpond.late_interaction.kernels import centroids, compiled, scan
from millpond.late_interaction.scoring import exact, residuals, similarity
from millpond.late_interaction.scoring.exact import Tokens, score
from millpond.native.library import ISAS, KernelTable, isa, kernel_table
from millpond.vectors.small_floats import from_bfloat16, to_bfloat16

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src/millpond/native"
WIDTHS = [1, 7, 48, 96, 128, 384, 1024]
DOCUMENTS = [0, 1, 31, 32, 33, 0, 1, 2, 200, 0, 48, 49, 1, 1, 96, 0]
QUERIES = [[0, 1, 32, 33, 100], [5], [16, 17], [3] * 40, [255, 2, 256, 257, 600, 1], [0]]
CODECS = [pytest.param(codec, id=codec.name) for codec in (INT8, BFLOAT16, FLOAT32)]
# Every width, with codecs in turn; every pair is tried nightly.
PAIRS = {(codec.name, width): (codec, width) for codec in (INT8, BFLOAT16, FLOAT32) for width in WIDTHS}
FAST = {(("int8", "bfloat16", "float32")[place % 3], width) for place, width in enumerate(WIDTHS)}


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """The kernels for AMX over the emulated tile instructions, in a library of their own."""
    pytest.importorskip("hatchling")
    if shutil.which("g++") is None or isa() not in ISAS[2:]:
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


@pytest.fixture(params=[*(slow_unless(name in (isa(), "numpy"), [name]) for name in (*ISAS, "amx emulated", "numpy"))])
def table(request, monkeypatch):
    """The functions of one instruction set; ``None``: numpy computes."""
    if request.param == "numpy":
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
        return from_bfloat16(to_bfloat16(flat)).astype(np.float64)
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


@pytest.mark.parametrize("codec", CODECS)
def test_threads_and_long_documents_change_nothing(table, codec):
    """Enough products for three threads: documents of several chunks, and many small ones."""
    documents = packed(ragged([8192, 1, 0, 20_000, 3] + [40] * 1000, 24, seed=1), codec)
    queries = ragged([32, 7, 64], 24)
    np.testing.assert_array_equal(score(queries, documents, threads=3), score(queries, documents, threads=1))
    few = Tokens(codec=codec, rows=documents.rows, scales=documents.scales, offsets=documents.offsets[:4])
    assert_scores(score(queries, few), expected(queries, few), queries)


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
def test_nothing_is_read_outside_the_arrays(table, codec, tmp_path):
    """Nor copied: the rows may be a read-only file, and documents may begin in the middle of them."""
    for width, lengths in ((1, [1]), (7, [33, 0, 2]), (40, DOCUMENTS), (68, [48]), (200, [100, 64, 5])):
        queries, documents = ragged([5, 32], width), ragged(lengths, width, seed=1)
        rows, scales = codec.pack(guarded(documents.flat))
        arrays = {"rows": guarded(rows), "scales": None if scales is None else guarded(scales)}
        tokens = Tokens(codec=codec, **arrays, offsets=guarded(documents.offsets))
        whole = score(Ragged(flat=guarded(queries.flat), offsets=guarded(queries.offsets)), tokens)
        assert_scores(whole, expected(queries, tokens), queries)
        np.save(tmp_path / "rows.npy", rows)
        mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
        part = Tokens(codec=codec, rows=mapped, scales=scales, offsets=documents.offsets[1:])
        np.testing.assert_allclose(score(queries, part), whole[:, 1:], rtol=1e-6)


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
    rows = Ragged(flat=flat, offsets=np.arange(5))
    step = np.float32(1) / np.float32(127) * np.float32(np.float16(1 / 127)) * 127 * 127
    np.testing.assert_allclose(score(rows, packed(rows, INT8)), flat @ flat.T * step, rtol=1e-6, atol=1e-9)


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
            by_numpy, scales_by_numpy = codec.pack(numbers())
        finite = np.isfinite(numbers()).all(axis=1)
        np.testing.assert_array_equal(rows[finite], by_numpy[finite])
        if scales is not None:
            np.testing.assert_array_equal(scales, scales_by_numpy)
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
    np.testing.assert_array_equal(BFLOAT16.unpack(halves, None, 13), from_bfloat16(to_bfloat16(rows)))
    same, none = FLOAT32.pack(rows)
    assert none is None and same is rows


def test_numbers_that_int8_cannot_hold_are_refused(table):
    large = np.array([[1.0, -1e7]], dtype=np.float32)
    with pytest.raises(InvalidRequestError, match=r"number 1e\+07, and codec='int8' stores numbers up to 8.32e"):
        INT8.pack(large)
    BFLOAT16.pack(large)


# --- Arguments --------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named():
    documents, queries = packed(ragged([3, 2], 16), INT8), ragged([2], 16)
    with pytest.raises(InvalidRequestError, match="queries are 8 wide, and the rows of the documents 16"):
        score(ragged([2], 8), documents)
    for outside in ([0, 2], [-1]):
        with pytest.raises(InvalidRequestError, match="indices outside of 0 to 1"):
            score(queries, documents, documents=outside)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.zeros((4, 8), np.float32)}, "rows are float32 .4, 8., which codec 'int8' does not pack"),
        ({"rows": np.zeros((4, 7), np.int8)}, "rows are int8 .4, 7."),
        ({"scales": None}, "scales must be given for codec 'int8'"),
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
    calls = [
        call
        for module in (codecs, exact, residual, residuals, centroids, scan)
        for name, call in vars(module).items()
        if name.endswith("Call")
    ]
    headers = "\n".join(path.read_text() for path in NATIVE.glob("*.h"))
    for call in calls:
        body = headers.partition(f"struct {call.__name__[1:]} {{")[2].partition("};")[0]
        lines = [line.partition("//")[0].strip().rstrip(";") for line in body.splitlines()]
        names = [part.split("=")[0].split()[-1].lstrip("*") for line in lines if line for part in line.split(",")]
        assert names == [name for name, _ in call._fields_], call
    assert len(calls) == 9


# --- maxsim -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["compiled", "numpy"])
def path(request, monkeypatch):
    """With the compiled kernels, where there are any, and without."""
    if request.param == "numpy":
        monkeypatch.setattr(compiled, "kernel_table", lambda: None)
    elif compiled.kernel_table() is None:
        pytest.skip("no compiled kernels")


def naive(queries, documents):
    """The definition, in float64 and two loops."""
    scores = np.zeros((len(queries), len(documents)))
    for i, query in enumerate(queries):
        for j, document in enumerate(documents):
            for token in query.astype(np.float64):
                scores[i, j] += max((document.astype(np.float64) @ token).tolist(), default=-np.inf)
    return scores


numbers_of_rows = st.lists(st.integers(0, 9), max_size=6)


@pytest.mark.usefixtures("path")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    queries=numbers_of_rows,
    documents=numbers_of_rows,
    block=st.integers(1, 64),
    tokens=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_maxsim_equals_the_definition_at_any_block_size(queries, documents, block, tokens, seed):
    query_matrices, document_matrices = ragged(queries, 8, seed=seed), ragged(documents, 8, seed=seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarity, "_BLOCK", block)
        patch.setattr(exact, "_BLOCK", block)
        patch.setattr(exact, "_QUERY_TOKENS", tokens)
        scores = maxsim(query_matrices, document_matrices)
        best, indices = maxsim(query_matrices, document_matrices, top_k=3)
    wanted = naive(query_matrices, document_matrices)
    assert scores.dtype == np.float32 and scores.shape == wanted.shape
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-5)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :3]
    assert indices.dtype == np.int64
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(best, np.take_along_axis(scores, order, axis=1))


@pytest.mark.usefixtures("path")
def test_no_implicit_zero_and_no_token_of_a_neighbour():
    """Every similarity of the middle document is negative, and its neighbours' tokens would all score higher."""
    query = Ragged.from_matrices([np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)], width=2)
    negative = np.array([[-3.0, -2.0], [-1.0, -5.0]], dtype=np.float32)
    positive = np.array([[9.0, 9.0]], dtype=np.float32)
    documents = Ragged.from_matrices([positive, negative, positive], width=2)
    np.testing.assert_array_equal(maxsim(query, documents), [[18.0, -3.0, 18.0]])
    assert maxsim(documents, query).tolist() == [[9.0], [-3.0], [9.0]]  # the sum is over the query's tokens


@pytest.mark.usefixtures("path")
def test_equal_scores_keep_the_order_of_the_documents(monkeypatch):
    monkeypatch.setattr(similarity, "_BLOCK", 40)
    queries, document = ragged([4, 0], 8), ragged([5], 8, seed=1)[0]
    copies = Ragged.from_matrices([document[:0], *[document] * 50], width=8)
    scores, indices = maxsim(queries, copies, top_k=7)
    assert len(set(scores[0].tolist())) == 1 and indices.tolist() == [list(range(1, 8)), list(range(7))]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kind", [np.float16, np.float64, np.int8, "read-only", "strided"], ids=str)
def test_other_rows_are_computed_in_float32_and_not_changed(kind, recwarn):
    queries, documents = ragged([3], 8), ragged([4, 5], 16, seed=1)
    flat = documents.flat[:, :8] if kind == "strided" else documents.flat[:, :8].copy() * 20
    flat = flat if isinstance(kind, str) else flat.astype(kind)
    flat.flags.writeable = kind != "read-only"
    before = flat.copy()
    given = Ragged(flat=flat, offsets=documents.offsets)
    scores = maxsim(queries, given)
    assert scores.dtype == np.float32 and not recwarn.list
    np.testing.assert_allclose(scores, naive(queries, given), rtol=1e-5)
    np.testing.assert_array_equal(flat, before)


def test_wrong_arguments_of_maxsim_are_named():
    queries = ragged([3], 8)
    with pytest.raises(InvalidRequestError, match=r"queries are 8 wide and documents 4"):
        maxsim(queries, ragged([3], 4))
    for top_k in (0, -1, True, 2.0, "3"):
        with pytest.raises(InvalidRequestError, match="top_k"):
            maxsim(queries, queries, top_k=top_k)
    for which in ("queries", "documents"):
        with pytest.raises(TypeError, match=rf"{which} is of type ndarray; pass a Ragged"):
            maxsim(**{"queries": queries, "documents": queries, which: queries.flat})


@pytest.mark.contract
def test_nothing_but_other_devices_needs_torch_and_a_submodule_hides_no_function():
    code = (
        "import pkgutil, sys; sys.modules['torch'] = None; import millpond.late_interaction as late\n"
        "for each in pkgutil.walk_packages(late.__path__, 'millpond.late_interaction.'):\n"
        "    '.cuda' in each.name or __import__(each.name)\n"
        "assert callable(late.maxsim), late.maxsim"
    )
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"], check=True, timeout=120)
