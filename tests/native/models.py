"""Native plans of one step, and the numbers that tests of them take."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.backends.native import self_check, structs
from millpond.backends.native.encoder import NativeEncoder, bounds_of
from millpond.backends.native.kernels import kernels_of
from millpond.backends.native.packing.weight_packer import Linear, tensor_of
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.native import library

# The precision of each instruction set's own kernels.
PRECISIONS = {name: "bfloat16" if kernels_of("bfloat16", name) is not None else "float32" for name in library.ISAS}
# What a rounding to the precision of the states changes at most, relatively.
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
MODELS = {"post-norm": self_check.post_norm, "pre-norm": self_check.pre_norm}
compiled = pytest.mark.skipif(library.isa() is None, reason="no compiled kernels: no C++ compiler, or no AVX2")


def has(isa):
    """Whether this processor, and the library, have an instruction set."""
    return library.isa(isa) == isa


def marks_of(isa):
    """Those of a test of an instruction set: it is slow if this processor has a better one of the same precision."""
    missing = pytest.mark.skipif(not has(isa), reason=f"no {isa}")
    best = [other for other in PRECISIONS if has(other) and PRECISIONS[other] == PRECISIONS[isa]][-1:]
    return [missing] if isa in best else [missing, pytest.mark.slow]


every_isa = pytest.mark.parametrize("isa", [pytest.param(isa, marks=marks_of(isa)) for isa in PRECISIONS])
# Instruction set and precision.
TARGETS = [pytest.param(name, dtype, marks=marks_of(name), id=f"{name}-{dtype}") for name, dtype in PRECISIONS.items()]


def linear(weight, bias=None):
    """What a plan reads of a linear layer."""
    return Linear(weight=tensor_of(weight), bias=None if bias is None else tensor_of(bias))


def product(rows, layer):
    """In float64, or exact for whole numbers."""
    result = rows.astype(float) @ layer.weight.float32().astype(float).T
    return result if layer.bias is None else result + layer.bias.float32()


def identity(columns):
    """A product that copies."""
    return linear(np.eye(columns))


def copied():
    return structs.NormWeights(kind=structs.COPY)


def encoder_of(isa, *calls):
    """An encoder of the steps that ``calls`` add to a builder."""
    return built(kernels_of(PRECISIONS[isa], isa), *calls)


def built(kernels, *calls):
    builder = PlanBuilder(kernels)
    for call in calls:
        call(builder)
    return NativeEncoder(builder.build())


def rounded(rows, dtype):
    """The nearest numbers that a precision has, as float32."""
    rows = np.asarray(rows, np.float32)
    if dtype == "float32":
        return rows
    return (tensor_of(rows).bfloat16().astype(np.uint32) << 16).view(np.float32).reshape(rows.shape)


def numbers(shape, dtype, seed=0, scale=1.0):
    """Normally distributed numbers that the precision has."""
    return rounded(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def integers(shape, seed=0, share=1.0):
    """-1, 0 and 1, all but ``share`` of them 0: their products have no rounding in any precision."""
    random = np.random.default_rng(seed)
    return (random.integers(-1, 2, shape) * (random.random(shape) < share)).astype(np.float32)


def given(rows):
    """Steps that make ``rows`` the states: token ``i`` has row ``i``."""

    def add(builder):
        builder.embed(tensor_of(rows))
        builder.norm(copied(), rows.shape[1])

    return add


def tokens(count):
    """The ids of `given`'s rows."""
    return np.arange(count, dtype=np.int32)


def encoded(encoder, count, lengths=None, **options):
    """The encoder's result for the rows of `given`, in float64."""
    return encoder.encode(tokens(count), bounds_of([count] if lengths is None else lengths), **options).astype(float)


def assert_near(result, expected, bound):
    """Every number within its own bound of the expected one; NaN where that is expected."""
    unknown = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(result), unknown)
    same = (result == expected) | unknown  # infinities
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, abs(result - expected) - bound)
    worst = off.argmax()
    assert off.max() <= 0, (result.flat[worst], expected.flat[worst], np.max(bound))
