"""Columns that only fill up to what the kernels compute: they count for nothing, and no result has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.native.models import PRECISIONS

from millpond.backends.native import structs
from millpond.backends.native.encoder import NativeEncoder, bounds_of
from millpond.backends.native.formulas import normalized
from millpond.backends.native.kernels import kernels_of
from millpond.backends.native.packing.weight_packer import Linear, tensor_of
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.native import library

KERNELS = [
    pytest.param(isa, dtype, id=isa, marks=pytest.mark.skipif(library.isa(isa) != isa, reason=f"no {isa}"))
    for isa, dtype in PRECISIONS.items()
]
every_kernel = pytest.mark.parametrize(("isa", "dtype"), KERNELS)
LENGTHS = (1, 7, 30, 2)
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8}


def numbers(shape, dtype, seed, *, around=0.0, scale=1.0):
    drawn = (np.random.default_rng(seed).standard_normal(shape) * scale + around).astype(np.float32)
    return drawn if dtype == "float32" else (drawn.view(np.uint32) >> 16 << 16).view(np.float32)


def padded(rows, columns):
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, columns - rows.shape[-1])])


def built(builder, real):
    plan = builder.build()
    plan.model.output = real
    return NativeEncoder(replace(plan, hidden=real))


@every_kernel
@pytest.mark.parametrize("affine", [False, True], ids=["", "affine"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(("real", "columns"), [(1, 32), (24, 32), (48, 64), (75, 96), (312, 320), (400, 416), (96, 96)])
def test_a_norm_counts_the_real_columns(real, columns, kind, affine, isa, dtype):
    count, epsilon = sum(LENGTHS), 1e-5
    rows = numbers((count, real), dtype, 0, around=100.0 if dtype == "float32" else 3.0)
    weight = numbers(real, dtype, 1) if affine else None
    bias = numbers(real, dtype, 2) if affine and kind == "layer" else None
    builder = PlanBuilder(kernels_of(dtype, isa))
    builder.embed(tensor_of(padded(rows, columns)))
    tensors = [None if part is None else tensor_of(padded(part, columns)) for part in (weight, bias)]
    norm = builder.layer_norm(*tensors, epsilon) if kind == "layer" else builder.rms_norm(tensors[0], epsilon)
    norm.padding = columns - real
    builder.norm(norm, columns, keep=True)
    builder.norm(structs.NormWeights(kind=structs.COPY), columns)
    encoder = built(builder, real)
    kinds = {"layer": structs.LAYER_NORM, "rms": structs.RMS_NORM}
    parts = [None if part is None else part.astype(float) for part in (weight, bias)]
    expected = normalized(rows.astype(float), kinds[kind], *parts, epsilon)
    bounds, ids = bounds_of(LENGTHS), np.arange(count, dtype=np.int32)
    wanted = np.stack([text.mean(0) for text in np.split(expected, bounds[1:-1])])
    mean = encoder.encode(ids, bounds, rows="mean")
    assert mean.shape == wanted.shape and mean.flags.c_contiguous
    np.testing.assert_allclose(mean, wanted, rtol=2 * ROUNDING[dtype], atol=2e-4 + 2 * ROUNDING[dtype])
    found = encoder.encode(ids, bounds)
    np.testing.assert_allclose(found, expected, rtol=1.1 * ROUNDING[dtype], atol=2e-4 * (1 + ROUNDING[dtype]))


@every_kernel
def test_heads_with_padding_in_their_middle_are_normed_and_turned(isa, dtype):
    """A head's two halves, which are turned together, have their padding behind each."""
    heads, half, wide, count, epsilon = 2, 13, 32, 9, 1e-6
    real, whole = heads * 2 * half, heads * wide
    places = np.concatenate(
        [h * wide + np.concatenate([np.arange(half), wide // 2 + np.arange(half)]) for h in range(heads)]
    )
    rows, weight = numbers((count, real), dtype, 0), numbers(2 * half, dtype, 1, around=1.0, scale=0.3)
    spread = np.zeros((count, 3 * whole), np.float32)
    spread[:, places], spread[:, whole + places] = rows, rows[:, ::-1]
    spread[:, 2 * whole + places] = 1.0
    builder, copied = PlanBuilder(kernels_of(dtype, isa)), structs.NormWeights(kind=structs.COPY)
    builder.embed(tensor_of(spread))
    builder.norm(copied, 3 * whole)
    builder.heads(Linear(weight=tensor_of(np.eye(3 * whole))))
    placed = np.zeros(wide, np.float32)
    placed[places[: 2 * half]] = weight
    norm = builder.rms_norm(tensor_of(placed), epsilon)
    norm.padding = wide - 2 * half
    builder.rotary(heads=heads, kv_heads=heads, dim=wide, norm=norm, key_norm=norm)
    builder.o_proj(Linear(weight=tensor_of(np.eye(3 * whole))))
    builder.norm(copied, 3 * whole)
    found = NativeEncoder(builder.build()).encode(np.arange(count, dtype=np.int32), bounds_of([count]))
    for first, part in ((0, rows), (whole, rows[:, ::-1])):
        expected = normalized(part.astype(float).reshape(count, heads, -1), structs.RMS_NORM, weight, None, epsilon)
        own = found[:, first : first + whole]
        np.testing.assert_allclose(
            own[:, places], expected.reshape(count, -1), rtol=2 * ROUNDING[dtype] + 1e-5, atol=1e-6
        )
        assert (np.delete(own, places, axis=1) == 0).all()
