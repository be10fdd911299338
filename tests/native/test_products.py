"""Attention, whole models and products in eight bits of the native encoder, against formulas."""

import ctypes
from functools import partial

import numpy as np
import pytest
from tests.native.models import (
    MODELS,
    PRECISIONS,
    ROUNDING,
    assert_near,
    copied,
    encoder_of,
    every_isa,
    given,
    identity,
    linear,
    numbers,
    rounded,
    tokens,
)
from tests.pairwise import pairwise

from millpond.backends.native import structs
from millpond.backends.native.encoder import NativeEncoder, bounds_of
from millpond.backends.native.formulas import Inputs, attended, formulas, read
from millpond.backends.native.kernels import kernels_of
from millpond.backends.native.packing.weight_packer import tensor_of
from millpond.backends.native.plans import plan
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.self_check import VOCABULARY
from millpond.native import library

# --- Attention: lengths, heads, masks, and what is added to scores ----------------------------------------------------


# Around a vector, a block of rows, a unit of keys, and the rows that threads divide a text by (512).
LENGTHS = (1, 2, 5, 7, 12, 13, 15, 16, 17, 31, 32, 33, 48, 63, 65, 130)
HEADS = {  # heads, kv_heads, dim
    "2x32": (2, 2, 32),
    "4x64-grouped": (4, 2, 64),
    "3x32-one-key-head": (3, 1, 32),
    "2x96": (2, 2, 96),
    "2x128-grouped": (2, 1, 128),
    "1x256": (1, 1, 256),
}


class Texts:
    """Random queries, keys and values of several texts, and their attention both ways."""

    def __init__(self, isa, heads, kv_heads, dim, lengths, seed=0, size=1.0):
        self.isa, self.dtype, self.shape, self.lengths = isa, PRECISIONS[isa], (heads, kv_heads, dim), lengths
        self.rows = numbers((sum(lengths), (heads + 2 * kv_heads) * dim), self.dtype, seed, size)

    def native(self, *, threads=1, counts=None, **masks):
        heads, kv_heads, dim = self.shape
        columns = heads * dim
        encoder = encoder_of(
            self.isa,
            given(self.rows),
            lambda b: b.heads(identity(self.rows.shape[1])),
            lambda b: b.attention(heads=heads, kv_heads=kv_heads, dim=dim, **masks),
            lambda b: b.o_proj(identity(columns)),
            lambda b: b.norm(copied(), columns),
        )
        keys = None if counts is None else np.array(counts, dtype=np.int32)
        result = encoder.encode(tokens(len(self.rows)), bounds_of(self.lengths), keys=keys, threads=threads)
        return result.astype(float)

    def expected(self, *, counts=None, **masks):
        heads, kv_heads, dim = self.shape
        counts = counts or self.lengths
        results, sizes = [], []
        for rows, count in zip(np.split(self.rows, np.cumsum(self.lengths)[:-1]), counts, strict=True):
            whole = rows.astype(float).reshape(len(rows), -1, dim)
            result, size = attended(*np.split(whole, [heads, heads + kv_heads], axis=1), count=count, **masks)
            results.append(result.reshape(len(rows), -1))
            sizes.append(size.reshape(len(rows), -1))
        return np.concatenate(results), np.concatenate(sizes)

    def check(self, *, threads=1, **masks):
        with np.errstate(over="ignore", invalid="ignore"):
            expected, size = self.expected(**masks)
        result = self.native(threads=threads, **masks)
        scores = 1 + masks["scale"] * float(abs(self.rows).max()) ** 2 * self.shape[2] ** 0.5
        slack = 1e-6 * scores if self.dtype == "float32" else 3 * ROUNDING[self.dtype]
        if masks.get("softcap") and self.dtype == "bfloat16":
            slack += 4e-5 * masks["softcap"]
        assert_near(result, expected, slack * size + ROUNDING[self.dtype] * abs(expected))


MASKS = {
    "all": {},
    "causal": {"causal": True},
    "window-1": {"window": 1},
    "window-7": {"window": 7},
    "window-64": {"window": 64},
    "causal-window-7": {"causal": True, "window": 7},
    "causal-window-64": {"causal": True, "window": 64},
}
every_mask = pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)


@every_isa
@pairwise(shape=HEADS, masks=MASKS)
def test_attention_of_every_length(isa, shape, masks):
    heads, kv_heads, dim = shape
    Texts(isa, heads, kv_heads, dim, LENGTHS).check(scale=dim**-0.5, **masks)


@every_isa
@every_mask
def test_limited_keys(isa, masks):
    """Rows behind the last key attend too: a window may leave them none, and their result is 0."""
    lengths = [40, 40, 40, 40, 40, 100, 1, 1]
    counts = [0, 1, 39, 40, 20, 33, 1, 0]
    texts = Texts(isa, 3, 1, 64, lengths)
    texts.check(scale=0.125, counts=counts, **masks)
    without = texts.native(scale=0.125, counts=counts, window=7)
    assert (without[:40] == 0).all() and (without[-1] == 0).all()  # no key at all
    assert (without[160 + 26 : 200] == 0).all()  # the last of 20 keys is 7 positions back
    assert (without[160 : 160 + 26] != 0).any(axis=1).all()


@every_isa
@pairwise(softcap=[None, 5.0, 50.0], with_distances=[False, True], masks=MASKS)
def test_a_softcap_and_distances_while_scores_are_read(isa, softcap, with_distances, masks):
    heads, reach = 4, 130
    distances = numbers((heads, 2 * reach - 1), "float32", 5, 2.0) if with_distances else None
    texts = Texts(isa, heads, 2, 32, [1, 2, 31, 65, 130, 17], size=2.0)
    texts.check(scale=0.5, softcap=softcap, distances=distances, **masks)


@every_isa
@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0])
def test_small_and_large_scores(isa, size):
    """Without a maximum that is subtracted, these would leave float32."""
    texts = Texts(isa, 2, 2, 64, [3, 70], size=1.0)
    texts.rows[:, :256] *= size
    texts.rows = rounded(texts.rows, texts.dtype)
    texts.check(scale=1.0)


@every_isa
def test_scores_that_are_none_spoil_their_own_text_alone(isa):
    lengths = [20, 33, 1, 40]
    texts = Texts(isa, 2, 2, 32, lengths)
    before = texts.native(scale=0.2)
    for bad in (np.nan, np.inf):
        broken = Texts(isa, 2, 2, 32, lengths)
        # A copy through a product would spread it over the row: it arises in the step itself.
        broken.rows[25] = 3e38 if bad == np.inf else np.nan
        after = broken.native(scale=0.2)
        assert np.array_equal(after[:20], before[:20]) and np.array_equal(after[53:], before[53:])
        assert not np.isfinite(after[20:53]).all()


@every_isa
@pytest.mark.parametrize(("threads", "masks"), [(1, {}), (2, {"causal": True}), (3, {"window": 64})], ids=str)
def test_long_texts(isa, threads, masks):
    Texts(isa, 2, 1, 32, [511, 1, 512, 513]).check(scale=0.2, threads=threads, **masks)


@pytest.mark.slow
@every_isa
@pairwise(masks=MASKS, length=[1023, 1025, 2048], threads=[1, 2])
def test_very_long_texts(isa, length, threads, masks):
    Texts(isa, 2, 1, 64, [length]).check(scale=0.125, threads=threads, **masks)


# --- Whole models in the native encoder against float64, and what a call may read of them -----------------------------


SEVERAL = (1, 17, 33, 64, 120, 1)
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
ROWS = ("all", "first", "last", "mean")


def native_of(isa, model):
    return encoder_of(isa, lambda builder: model(builder, PRECISIONS[isa], positions=130))


def drawn_ids(lengths, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, sum(lengths)).astype(np.int32)


def assert_like(isa, result, expected):
    """As near as the precision of the states through two layers."""
    assert result.shape == expected.shape
    off = (result - expected) / np.sqrt(np.square(expected).mean(-1, keepdims=True))
    exact = PRECISIONS[isa] == "float32"
    assert abs(off).max() < (2e-5 if exact else 0.05)
    assert np.sqrt(np.square(off).mean(-1)).max() < (3e-6 if exact else 0.01)


@every_isa
@every_model
@pytest.mark.parametrize(("rows", "threads"), [("all", 1), ("first", 2), ("last", 3), ("mean", 2)])
def test_a_whole_model_is_that_of_its_formulas(isa, model, rows, threads):
    native = native_of(isa, model)
    random = np.random.default_rng(1)
    ids = drawn_ids(SEVERAL)
    types = random.integers(0, 2, len(ids)).astype(np.int32)
    skip = np.array([int(random.integers(0, length)) for length in SEVERAL], dtype=np.int32)
    keys = np.array([int(random.integers(1, length + 1)) for length in SEVERAL], dtype=np.int32)
    for options in ({}, {"offset": 3, "types": types, "keys": keys} | ({} if rows == "all" else {"skip": skip})):
        inputs = Inputs(lengths=SEVERAL, ids=ids, **{name: options[name] for name in options if name != "skip"})
        states = formulas(partial(model, positions=130), PRECISIONS[isa], inputs)
        expected = read(states, SEVERAL, rows, options.get("skip"))
        result = native.encode(ids, bounds_of(SEVERAL), rows=rows, threads=threads, **options)
        assert_like(isa, result, expected)


@every_isa
@every_model
def test_reading_one_row_is_reading_all_and_taking_it(isa, model):
    """To the last bit: the last layer of fewer rows is the same arithmetic."""
    native = native_of(isa, model)
    ids, bounds = drawn_ids(SEVERAL), bounds_of(SEVERAL)
    everything = native.encode(ids, bounds)
    assert np.array_equal(native.encode(ids, bounds, rows="first"), everything[bounds[:-1]])
    assert np.array_equal(native.encode(ids, bounds, rows="last"), everything[bounds[1:] - 1])
    skip = np.array([length // 2 for length in SEVERAL], dtype=np.int32)
    assert np.array_equal(native.encode(ids, bounds, rows="first", skip=skip), everything[bounds[:-1] + skip])


@every_isa
def test_the_time_of_each_kind_of_step_is_added_up(isa):
    native = native_of(isa, MODELS["post-norm"])
    ids, bounds = drawn_ids(SEVERAL), bounds_of(SEVERAL)
    timings = np.zeros(8)
    plain = native.encode(ids, bounds)
    assert np.array_equal(native.encode(ids, bounds, timings=timings), plain)
    heads = 3  # no step of this model turns them
    assert (np.delete(timings, heads) > 0).all() and timings[heads] == 0


# --- Products in eight bits: against the integer formulas, at the extremes of a row's range, and in any batch ---------


CHUNK = 384
F = np.float32

DTYPES = ["float32", *(["bfloat16"] if kernels_of("bfloat16") else [])]
# Each of them multiplies bytes in its own way; those between them take over what the one before has.
SETS = [
    isa
    for isa in ("avx2", "avxvnni", "avx512", "neon", "dotprod", "bf16")
    if isa in library.ISAS and library.isa(isa) == isa
]
highest = None


@pytest.fixture(params=SETS)
def each_set(request):
    global highest
    highest = request.param
    yield
    highest = None


eight_bits = pytest.mark.usefixtures("each_set")


def layer_of(inner, out, *, bias=True, seed=0):
    random = np.random.default_rng(seed)
    weight = random.standard_normal((out, inner)) / inner**0.5
    return linear(weight, random.standard_normal(out) if bias else None)


def rows_like(count, columns, seed=0):
    """Numbers whose ranges differ from row to row, with a large column as trained encoders have them."""
    numbers = np.random.default_rng(seed).normal(0.2, 1, (count, columns)).astype(F)
    numbers[:, 3] *= 20
    return numbers * np.random.default_rng(seed + 1).uniform(0.01, 3, (count, 1)).astype(F)


def kernels(dtype="float32", int8="all"):
    found = kernels_of(dtype, highest if dtype == "float32" else None, int8=int8)
    assert found is not None
    return found


def run_all(builder, lengths, threads=1):
    """All rows of words 0, 1, 2, ..., in texts of these lengths."""
    encoder = NativeEncoder(builder.build())
    ids = np.arange(sum(lengths), dtype=np.int32)
    return encoder.encode(ids, bounds_of(lengths), threads=threads)


def with_rows(kernels, rows):
    builder = PlanBuilder(kernels)
    builder.embed(tensor_of(rows))
    builder.norm(structs.NormWeights(kind=structs.COPY), rows.shape[1])
    return builder


def product_of(rows, layer, lengths=None, *, threads=1, dtype="float32"):
    builder = with_rows(kernels(dtype), rows)
    builder.up_proj(layer)
    builder.norm(structs.NormWeights(kind=structs.COPY), layer.weight.shape[0])
    return run_all(builder, lengths or [len(rows)], threads)


def quantized(rows):
    """Codes, steps and zeros of one chunk of rows, in float32 as the kernels compute them."""
    low, high = np.minimum(rows.min(1), 0), np.maximum(rows.max(1), 0)
    steps = (F(0.5) * high - F(0.5) * low) * F(1 / 127.5)
    some = steps >= F(1.2e-38)
    inverse = np.where(some, F(1) / np.where(some, steps, F(1)), F(0))
    zeros = np.rint(-low * inverse)
    codes = np.minimum(np.rint(rows * inverse[:, None]) + zeros[:, None], 255)
    assert codes.min() >= 0
    return codes.astype(np.int64), np.where(some, steps, F(0)), zeros.astype(np.int64)


def scales_of(weight):
    """Of one chunk of a weight's inner numbers, for each column."""
    scales = np.maximum(np.abs(weight).max(1), F(1e-12)) / F(127)
    if highest == "avx2":  # sums of 16 bits hold the products of four weights of one sign with 255
        groups = weight.reshape(len(weight), -1, 2, 2, 2).swapaxes(2, 3).reshape(len(weight), -1, 4)
        most = np.maximum(groups.clip(min=0).sum(2).max(1), -groups.clip(max=0).sum(2).min(1))
        scales = np.maximum(scales, most.astype(F) / F(126))
    return scales


def expected_product(rows, weight, bias):
    """The same sums with exact integers, chunk by chunk."""
    sums = np.broadcast_to(F(0) if bias is None else bias, (len(rows), len(weight)))
    for start in range(0, rows.shape[1], CHUNK):
        codes, steps, zeros = quantized(rows[:, start : start + CHUNK])
        part = weight[:, start : start + CHUNK]
        scales = scales_of(part)
        integers = np.rint(part / scales[:, None]).astype(np.int64)
        whole = (codes @ integers.T - zeros[:, None] * integers.sum(1)).astype(F)
        sums = (whole.astype(np.float64) * (scales * steps[:, None]) + sums).astype(F)
    return sums


def weights_of(layer):
    return layer.weight.float32(), None if layer.bias is None else layer.bias.float32()


@eight_bits
@pairwise(count=[1, 10, 11, 13, 64, 65, 150], bias=[True, False])
def test_a_product_is_the_integer_formula(count, bias):
    assert_integer_formula(count, bias, "float32")


@pytest.mark.skipif("bfloat16" not in DTYPES, reason="this processor has no kernels in bfloat16")
@pairwise(count=[1, 13, 150], bias=[True, False])
def test_a_product_of_states_in_bfloat16_is_the_integer_formula(count, bias):
    assert_integer_formula(count, bias, "bfloat16")


def assert_integer_formula(count, bias, dtype):
    inner, out = [(32, 32), (96, 160), (384, 64), (416, 96), (768, 32), (1184, 64)][(count + bias) % 6]
    rows, layer = rounded(rows_like(count, inner, seed=count), dtype), layer_of(inner, out, bias=bias, seed=inner)
    weight, given_bias = weights_of(layer)
    weight, given_bias = rounded(weight, dtype), None if given_bias is None else rounded(given_bias, dtype)
    found, expected = product_of(rows, layer, dtype=dtype), expected_product(rows, weight, given_bias)
    off = np.abs(found - expected) - (0 if dtype == "float32" else ROUNDING[dtype] * np.abs(expected))
    assert off.max() <= 1e-6 * np.abs(expected).max()
    exact = rows @ weight.T + (0 if given_bias is None else given_bias)
    assert 1e-5 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.05


@eight_bits
def test_extreme_rows():
    rows = rows_like(14, 448)
    rows[0] = 0
    rows[1] = 5
    rows[2] = -3
    rows[3] = np.abs(rows[3])
    rows[4, 7] = 1e30
    rows[5, 8] = -3e38
    rows[5, 9] = 3e38
    rows[6] *= F(1e-36)
    rows[7] *= F(1e-39)  # denormal
    rows[8] = [*[1, 0] * 224]
    weight = layer_of(448, 64, bias=False).weight.float32().copy()
    weight[:3] = [[0.0], [1.0], [-1.0]]
    layer = linear(weight)
    found = product_of(rows, layer)
    kept = np.delete(np.arange(14), [5, 6, 7])
    expected = expected_product(rows[kept], *weights_of(layer))
    assert np.abs(found[kept] - expected).max(1).tolist() == pytest.approx([0] * len(kept), abs=1e-6 * 1e30)
    small = kept != 4
    assert np.abs(found[kept][small] - expected[small]).max() <= 1e-5
    assert not found[0].any()
    near = 0.02 if highest == "avx2" else 1e-5  # four weights of 1 in a sum of 16 bits have codes of 32 there
    assert found[1, :3] == pytest.approx([0, 5 * 448, -5 * 448], rel=near)
    assert found[2, :3] == pytest.approx([0, -3 * 448, 3 * 448], rel=near)
    assert np.isfinite(found[6:8]).all()
    assert np.abs(found[6:8]).max() < 1e-30
    assert not np.isnan(found[5]).any()  # a range beyond float32: its numbers are at most infinite


@eight_bits
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bad", "column"), [(np.nan, 0), (np.inf, 383), (-np.inf, 384), (np.nan, 447)])
def test_a_row_that_is_not_finite_is_nan_and_no_other(bad, column, dtype):
    rows, layer = rows_like(30, 448), layer_of(448, 64)
    clean = product_of(rows, layer, dtype=dtype)
    rows[13, column] = bad
    found = product_of(rows, layer, dtype=dtype)
    assert np.isnan(found[13]).all()
    assert np.array_equal(np.delete(found, 13, 0), np.delete(clean, 13, 0))


def feed(kernels, rows, inner, lengths, *, activation="relu", gated=False, add=False, threads=1):
    hidden = rows.shape[1]
    up, down, gate = layer_of(hidden, inner, seed=1), layer_of(inner, hidden, seed=2), layer_of(hidden, inner, seed=3)
    builder = with_rows(kernels, rows)
    builder.mlp(up, down, activation, gate=gate if gated else None, add=add)
    builder.norm(structs.NormWeights(kind=structs.COPY), hidden)
    return run_all(builder, lengths, threads), (up, down, gate)


@eight_bits
@pytest.mark.parametrize("add", [False, True], ids=["fresh", "added"])
@pytest.mark.parametrize(("inner", "count"), [(32, 140), (96, 3), (384, 65), (416, 64), (1536, 3)])
def test_a_feed_is_quantized_by_chunks_of_inner_columns(inner, count, add):
    rows = rows_like(count, 96, seed=inner)
    found, (up, down, _) = feed(kernels(int8="feeds"), rows, inner, [count], add=add)
    states = np.maximum(expected_product(rows, *weights_of(up)), 0)
    expected = expected_product(states, *weights_of(down)) + (rows if add else 0)
    # A state that the kernels round otherwise in its last digit may have the next code.
    assert np.abs(found - expected).max() <= 0.01 * np.abs(expected).max()
    assert np.median(np.abs(found - expected)) <= 1e-6 * np.abs(expected).max()


@eight_bits
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_a_feed_is_close_to_float32(activation, gated):
    rows = rows_like(100, 96)
    exact, _ = feed(kernels(int8="none"), rows, 416, [100], activation=activation, gated=gated)
    for dtype in DTYPES:
        found, _ = feed(kernels(dtype, "feeds"), rows, 416, [60, 40], activation=activation, gated=gated)
        error = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert 1e-4 < error.max() < 0.05


@eight_bits
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True], ids=["layer norm", "RMS norm"])
def test_a_large_column_does_not_take_the_range_of_the_others(dtype, rms, monkeypatch):
    """Smoothing, with weights that two layers share, a residual, and a last norm whose states are the result."""

    def states(int8):
        random = np.random.default_rng(5)
        builder, hidden = PlanBuilder(kernels(dtype, int8)), 96
        weight, bias = random.normal(1, 0.1, (2, hidden)), tensor_of(random.normal(0, 0.3, hidden))
        weight[0, 3] = 15
        builder.embed(tensor_of(random.standard_normal((60, hidden))))
        large, usual = (
            builder.rms_norm(tensor_of(row), 1e-5) if rms else builder.layer_norm(tensor_of(row), bias, 1e-5)
            for row in weight
        )
        builder.norm(large, hidden)
        first = builder.count
        up = layer_of(hidden, 416, seed=1).weight.float32().copy()
        up[:, 3] /= 15
        builder.mlp(linear(up * 2), layer_of(416, hidden, seed=2), "relu")
        builder.norm(usual, hidden, residual=True)
        builder.repeat(first, builder.count)
        return run_all(builder, [40, 20])

    exact, found = states("none"), states("feeds")
    monkeypatch.setattr(plan, "smoothed_norms", lambda *_: [])
    unsmoothed = states("feeds")
    error, before = (np.linalg.norm(states - exact) for states in (found, unsmoothed))
    assert error < 0.9 * before and error < 0.02 * np.linalg.norm(exact)


@eight_bits
@pairwise(dtype=DTYPES, gated=[False, True], int8=["feeds", "all"])
def test_a_row_has_the_same_bits_in_any_batch(dtype, gated, int8):
    rows = rows_like(200, 96)
    options = {"activation": "gelu", "gated": gated}
    together, _ = feed(kernels(dtype, int8), rows, 448, [200], **options)
    for threads, lengths in ((1, [1, 63, 64, 65, 7]), (2, [200]), (3, [30, 170])):
        apart, _ = feed(kernels(dtype, int8), rows, 448, lengths, threads=threads, **options)
        assert np.array_equal(together, apart)
    for first, last in ((0, 1), (70, 83), (100, 164)):
        alone, _ = feed(kernels(dtype, int8), rows[first:last], 448, [last - first], threads=2, **options)
        assert np.array_equal(together[first:last], alone)


@eight_bits
@pairwise(dtype=DTYPES, gated=[False, True], int8=["feeds", "all"])
def test_a_text_longer_than_a_block_has_the_same_bits(dtype, gated, int8):
    """Such a text runs in slices, each with codes of its own rows only."""
    up, down, gate = layer_of(96, 448, seed=1), layer_of(448, 96, seed=2), layer_of(96, 448, seed=3)
    builder = with_rows(kernels(dtype, int8), rows_like(520, 96))
    builder.mlp(up, down, "gelu", gate=gate if gated else None, add=True)
    builder.norm(structs.NormWeights(kind=structs.COPY), 96)
    encoder = NativeEncoder(builder.build())
    ids = np.arange(520, dtype=np.int32)
    encoder.block = 1024
    whole = encoder.encode(ids, bounds_of([193, 7, 320]))
    for encoder.block in (32, 64, 96):
        for threads in (1, 2, 3):
            assert np.array_equal(encoder.encode(ids, bounds_of([193, 7, 320]), threads=threads), whole)


@eight_bits
def test_only_the_feeds_are_in_eight_bits_unless_all_are_asked_for():
    rows, layer = rows_like(20, 96), layer_of(96, 64)
    found = []
    for int8 in ("none", "feeds", "all"):
        builder = with_rows(kernels(int8=int8), rows)
        builder.up_proj(layer)
        builder.norm(structs.NormWeights(kind=structs.COPY), 64)
        found.append(run_all(builder, [20]))
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


BYTES = "avxvnni", "avx512", "avx512bf16"  # sets that multiply bytes in attention


def attention_of(dtype, dim, **masks):
    """An encoder of one attention that reads the words' rows through a product in eight bits; word 7 is 0."""
    heads, columns = 2, 2 * dim
    rows = np.random.default_rng(dim).standard_normal((400, columns)).astype(F)
    rows[7] = 0
    builder = with_rows(kernels(dtype), rows)
    builder.heads(*(layer_of(columns, columns, seed=seed, bias=False) for seed in (1, 2, 3)))
    builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, **masks)
    builder.o_proj(layer_of(columns, columns, seed=4))
    builder.norm(structs.NormWeights(kind=structs.COPY), columns)
    return NativeEncoder(builder.build())


def plainly(encoder, ids, lengths, **options):
    """What an encoder computes with scores in the precision of the states."""
    [step] = [step for step in encoder.plan.model.steps[: encoder.plan.model.count] if step.kind == structs.ATTENTION]
    step.int8 = 0
    states = encoder.encode(ids, bounds_of(lengths), **options)
    step.int8 = 1
    return states


@eight_bits
@pairwise(dtype=DTYPES, dim=[32, 64, 128, 96], length=[63, 64, 65, 150])
def test_scores_of_long_texts_are_in_eight_bits(dtype, dim, length):
    encoder, ids = attention_of(dtype, dim), np.arange(length, dtype=np.int32)
    found, plain = encoder.encode(ids, bounds_of([length])), plainly(encoder, ids, [length])
    if encoder.plan.kernels.isa not in BYTES or dim == 96 or length < 64:
        assert np.array_equal(found, plain)
        return
    off = np.linalg.norm(found - plain, axis=1) / np.linalg.norm(plain, axis=1)
    assert 1e-4 < off.mean() < 0.01


@eight_bits
@pytest.mark.parametrize("masks", [{"causal": True}, {"window": 60}], ids=["causal", "window"])
def test_scores_of_a_part_of_a_text_are_not(masks):
    encoder, ids = attention_of("float32", 32, **masks), np.arange(150, dtype=np.int32)
    assert np.array_equal(encoder.encode(ids, bounds_of([150])), plainly(encoder, ids, [150]))


@eight_bits
def test_a_window_that_is_as_long_as_the_keys():
    encoder, ids = attention_of("float32", 32, window=71), np.arange(150, dtype=np.int32)
    keys = np.array([70], dtype=np.int32)  # rows behind them attend to fewer and fewer, the last ones to none
    found, plain = encoder.encode(ids, bounds_of([150]), keys=keys), plainly(encoder, ids, [150], keys=keys)
    assert np.isfinite(plain).all()
    assert np.linalg.norm(found - plain, axis=1).max() < 0.05 * np.linalg.norm(plain, axis=1).max()


@eight_bits
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_in_eight_bits_are_the_same_in_any_batch(dtype):
    encoder, lengths = attention_of(dtype, 64), [70, 3, 150, 64, 90]
    ids = np.arange(sum(lengths), dtype=np.int32)
    together = encoder.encode(ids, bounds_of(lengths))
    for threads in (2, 3):
        assert np.array_equal(encoder.encode(ids, bounds_of(lengths), threads=threads), together)
    assert np.array_equal(encoder.encode(ids[73:223], bounds_of([150])), together[73:223])


@eight_bits
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_key_that_is_not_finite_is_in_all_rows_of_its_text(bad):
    encoder = attention_of("float32", 32)
    table = np.ctypeslib.as_array((ctypes.c_float * (400 * 64)).from_address(encoder.plan.model.steps[0].words))
    table[100 * 64 + 5] = bad
    found = encoder.encode(np.arange(300, dtype=np.int32), bounds_of([70, 80, 150]))
    assert np.isnan(found[70:150]).all() and np.isfinite(found[:70]).all() and np.isfinite(found[150:]).all()
