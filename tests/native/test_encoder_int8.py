"""Products in eight bits: against the integer formulas, at the extremes of a row's range, and in any batch."""

import numpy as np
import pytest
import torch
from tests.pairwise import pairwise
from torch import nn

from millpond.models.native import structs
from millpond.models.native.encoder import NativeEncoder, bounds_of
from millpond.models.native.kernels import kernels_of
from millpond.models.native.plan import PlanBuilder
from millpond.native.library import ISAS, isa, kernel_table

CHUNK = 384
F = np.float32
pytestmark = pytest.mark.skipif(isa() not in ISAS[1:], reason="needs a processor with AVX512-VNNI")
DTYPES = [torch.float32, *([torch.bfloat16] if isa() in ISAS[2:] else [])]


def linear(inner, out, *, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inner, out, bias=bias)
    layer.weight.data = torch.randn(out, inner, generator=generator) / inner**0.5
    if bias:
        layer.bias.data = torch.randn(out, generator=generator)
    return layer


def rows_like(count, columns, seed=0):
    """Numbers whose ranges differ from row to row, with a large column as trained encoders have them."""
    numbers = np.random.default_rng(seed).normal(0.2, 1, (count, columns)).astype(F)
    numbers[:, 3] *= 20
    return numbers * np.random.default_rng(seed + 1).uniform(0.01, 3, (count, 1)).astype(F)


def kernels(dtype=torch.float32, int8="all", highest=None):
    found = kernels_of(dtype, highest, int8=int8)
    assert found is not None
    return found


def run(builder, lengths, threads=1):
    """All rows of words 0, 1, 2, ..., in texts of these lengths."""
    encoder = NativeEncoder(builder.build())
    ids = np.arange(sum(lengths), dtype=np.int32)
    return encoder.encode(ids, bounds_of(lengths), threads=threads).numpy()


def with_rows(kernels, dtype, rows):
    builder = PlanBuilder(kernels, dtype)
    builder.embed(torch.from_numpy(rows))
    builder.norm(structs.NormWeights(kind=structs.COPY), rows.shape[1])
    return builder


def product(rows, layer, lengths=None, *, threads=1):
    builder = with_rows(kernels(), torch.float32, rows)
    builder.up_proj(layer)
    builder.norm(structs.NormWeights(kind=structs.COPY), layer.out_features)
    return run(builder, lengths or [len(rows)], threads)[:, : layer.out_features]


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


def expected_product(rows, weight, bias):
    """The same sums with exact integers, chunk by chunk."""
    scales = np.maximum(np.abs(weight).max(1), F(1e-12)) / F(127)
    integers = np.rint(weight / scales[:, None]).astype(np.int64)
    sums = np.broadcast_to(F(0) if bias is None else bias, (len(rows), len(weight)))
    for start in range(0, rows.shape[1], CHUNK):
        codes, steps, zeros = quantized(rows[:, start : start + CHUNK])
        part = integers[:, start : start + CHUNK]
        whole = (codes @ part.T - zeros[:, None] * part.sum(1)).astype(F)
        sums = (whole.astype(np.float64) * (scales * steps[:, None]) + sums).astype(F)
    return sums


def weights_of(layer):
    return layer.weight.detach().numpy(), None if layer.bias is None else layer.bias.detach().numpy()


@pairwise(count=[1, 11, 12, 13, 64, 65, 150], bias=[True, False])
def test_a_product_is_the_integer_formula(count, bias):
    inner, out = [(32, 32), (96, 160), (384, 64), (416, 96), (768, 32), (1184, 64)][(count + bias) % 6]
    rows, layer = rows_like(count, inner, seed=count), linear(inner, out, bias=bias, seed=inner)
    found, expected = product(rows, layer), expected_product(rows, *weights_of(layer))
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()
    exact = rows @ weights_of(layer)[0].T + (0 if layer.bias is None else weights_of(layer)[1])
    assert 1e-5 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.05


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
    layer = linear(448, 64, bias=False)
    layer.weight.data[:3] = torch.tensor([[0.0], [1.0], [-1.0]])
    found = product(rows, layer)
    kept = np.delete(np.arange(14), [5, 6, 7])
    expected = expected_product(rows[kept], *weights_of(layer))
    assert np.abs(found[kept] - expected).max(1).tolist() == pytest.approx([0] * len(kept), abs=1e-6 * 1e30)
    small = kept != 4
    assert np.abs(found[kept][small] - expected[small]).max() <= 1e-5
    assert not found[0].any()
    assert found[1, :3] == pytest.approx([0, 5 * 448, -5 * 448], rel=1e-5)
    assert found[2, :3] == pytest.approx([0, -3 * 448, 3 * 448], rel=1e-5)
    assert np.isfinite(found[6:8]).all()
    assert np.abs(found[6:8]).max() < 1e-30
    assert not np.isnan(found[5]).any()  # a range beyond float32: its numbers are at most infinite


@pytest.mark.parametrize(("bad", "column"), [(np.nan, 0), (np.inf, 383), (-np.inf, 384), (np.nan, 447)])
def test_a_row_that_is_not_finite_is_nan_and_no_other(bad, column):
    rows, layer = rows_like(30, 448), linear(448, 64)
    clean = product(rows, layer)
    rows[13, column] = bad
    found = product(rows, layer)
    assert np.isnan(found[13]).all()
    assert np.array_equal(np.delete(found, 13, 0), np.delete(clean, 13, 0))


def test_a_weight_of_zeros():
    layer = linear(96, 64)
    layer.weight.data.zero_()
    assert np.array_equal(product(rows_like(5, 96), layer), np.tile(layer.bias.detach().numpy(), (5, 1)))


def feed(kernels, dtype, rows, inner, lengths, *, activation="relu", gated=False, add=False, threads=1):
    hidden = rows.shape[1]
    up, down, gate = linear(hidden, inner, seed=1), linear(inner, hidden, seed=2), linear(hidden, inner, seed=3)
    builder = with_rows(kernels, dtype, rows)
    builder.mlp(up, down, activation, gate=gate if gated else None, add=add)
    builder.norm(structs.NormWeights(kind=structs.COPY), hidden)
    return run(builder, lengths, threads), (up, down, gate)


@pytest.mark.parametrize("add", [False, True], ids=["fresh", "added"])
@pytest.mark.parametrize(("inner", "count"), [(32, 140), (96, 3), (384, 65), (416, 64), (1536, 3)])
def test_a_feed_is_quantized_by_chunks_of_inner_columns(inner, count, add):
    rows = rows_like(count, 96, seed=inner)
    found, (up, down, _) = feed(kernels(int8="feeds"), torch.float32, rows, inner, [count], add=add)
    states = np.maximum(expected_product(rows, *weights_of(up)), 0)
    expected = expected_product(states, *weights_of(down)) + (rows if add else 0)
    # A state that the kernels round otherwise in its last digit may have the next code.
    assert np.abs(found - expected).max() <= 0.01 * np.abs(expected).max()
    assert np.median(np.abs(found - expected)) <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_a_feed_is_close_to_float32(activation, gated):
    rows = rows_like(100, 96)
    exact, _ = feed(kernels(int8="none"), torch.float32, rows, 416, [100], activation=activation, gated=gated)
    for dtype in DTYPES:
        found, _ = feed(kernels(dtype, "feeds"), dtype, rows, 416, [60, 40], activation=activation, gated=gated)
        error = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert 1e-4 < error.max() < 0.05


@pairwise(dtype=DTYPES, gated=[False, True], int8=["feeds", "all"])
def test_a_row_has_the_same_bits_in_any_batch(dtype, gated, int8):
    rows = rows_like(200, 96)
    options = {"activation": "gelu", "gated": gated}
    together, _ = feed(kernels(dtype, int8), dtype, rows, 448, [200], **options)
    for threads, lengths in ((1, [1, 63, 64, 65, 7]), (2, [200]), (3, [30, 170])):
        apart, _ = feed(kernels(dtype, int8), dtype, rows, 448, lengths, threads=threads, **options)
        assert np.array_equal(together, apart)
    for first, last in ((0, 1), (70, 83), (100, 164)):
        alone, _ = feed(kernels(dtype, int8), dtype, rows[first:last], 448, [last - first], threads=2, **options)
        assert np.array_equal(together[first:last], alone)


@pairwise(dtype=DTYPES, gated=[False, True], int8=["feeds", "all"])
def test_a_text_longer_than_a_block_has_the_same_bits(dtype, gated, int8):
    """Such a text runs in slices, each with codes of its own rows only."""
    up, down, gate = linear(96, 448, seed=1), linear(448, 96, seed=2), linear(96, 448, seed=3)
    builder = with_rows(kernels(dtype, int8), dtype, rows_like(520, 96))
    builder.mlp(up, down, "gelu", gate=gate if gated else None, add=True)
    builder.norm(structs.NormWeights(kind=structs.COPY), 96)
    encoder = NativeEncoder(builder.build())
    ids = np.arange(520, dtype=np.int32)
    encoder.block = 1024
    whole = encoder.encode(ids, bounds_of([193, 7, 320]))
    for encoder.block in (32, 64, 96):
        for threads in (1, 2, 3):
            assert torch.equal(encoder.encode(ids, bounds_of([193, 7, 320]), threads=threads), whole)


def test_only_the_feeds_are_in_eight_bits_unless_all_are_asked_for():
    rows, layer = rows_like(20, 96), linear(96, 64)
    found = []
    for int8 in ("none", "feeds", "all"):
        builder = with_rows(kernels(int8=int8), torch.float32, rows)
        builder.up_proj(layer)
        builder.norm(structs.NormWeights(kind=structs.COPY), 64)
        found.append(run(builder, [20])[:, :64])
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_no_kernels_where_the_processor_has_no_integer_products():
    assert kernels_of(torch.float32, "avx2", int8="feeds") is None
    assert kernels_of(torch.float32, "avx2") is not None
    assert not kernel_table("avx2").pack_weight_int8
