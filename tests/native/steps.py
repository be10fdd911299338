"""Native plans of one step, and the same step in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from millpond.models.native import self_check, structs
from millpond.models.native.encoder import NativeEncoder, bounds_of
from millpond.models.native.kernels import kernels_of
from millpond.models.native.plan import PlanBuilder
from millpond.native import library

# The precision of each instruction set's own kernels.
PRECISIONS = {
    name: torch.bfloat16 if kernels_of(torch.bfloat16, name) is not None else torch.float32 for name in library.ISAS
}
# What a rounding to the precision of the states changes at most, relatively.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def has(isa):
    """Whether this processor, and the library, have an instruction set."""
    return library.isa(isa) == isa


def marks_of(isa):
    """Those of a test of an instruction set: it is slow if this processor has a better one of the same precision."""
    missing = pytest.mark.skipif(not has(isa), reason=f"no {isa}")
    best = [other for other in PRECISIONS if has(other) and PRECISIONS[other] == PRECISIONS[isa]][-1:]
    return [missing] if isa in best else [missing, pytest.mark.slow]


every_isa = pytest.mark.parametrize("isa", [pytest.param(isa, marks=marks_of(isa)) for isa in PRECISIONS])


def linear(weight, bias=None):
    """What a plan reads of a linear layer."""
    return SimpleNamespace(weight=weight, bias=bias)


def identity(columns):
    """A product that copies."""
    return linear(torch.eye(columns))


def copied():
    return structs.NormWeights(kind=structs.COPY)


def encoder_of(isa, *calls):
    """An encoder of the steps that ``calls`` add to a builder."""
    dtype = PRECISIONS[isa]
    builder = PlanBuilder(kernels_of(dtype, isa), dtype)
    for call in calls:
        call(builder)
    return NativeEncoder(builder.build())


def numbers(shape, dtype, seed=0, scale=1.0):
    """Normally distributed numbers that the precision has."""
    drawn = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * scale)
    return drawn.to(dtype).float()


def integers(shape, seed=0, share=1.0):
    """-1, 0 and 1, all but ``share`` of them 0: their products have no rounding in any precision."""
    random = np.random.default_rng(seed)
    drawn = random.integers(-1, 2, shape) * (random.random(shape) < share)
    return torch.from_numpy(drawn).float()


def given(rows):
    """Steps that make ``rows`` the states: token ``i`` has row ``i``."""

    def add(builder):
        builder.embed(rows)
        builder.norm(copied(), rows.shape[1])

    return add


def tokens(count):
    """The ids of `given`'s rows."""
    return np.arange(count, dtype=np.int32)


def one_text(count):
    return bounds_of([count])


def encoded(encoder, count, lengths=None, **options):
    """The encoder's result for the rows of `given`, in float64."""
    bounds = bounds_of([count] if lengths is None else lengths)
    return encoder.encode(tokens(count), bounds, **options).double()


def assert_near(result, expected, bound):
    """Every number within its own bound of the expected one; NaN where that is expected."""
    unknown = expected.isnan()
    assert torch.equal(result.isnan(), unknown), (result, expected)
    same = result == expected  # infinities
    off = torch.where(same | unknown, 0.0, (result - expected).abs() - bound)
    worst = off.argmax()
    assert off.max() <= 0, (result.flatten()[worst], expected.flatten()[worst], torch.as_tensor(bound).max())


MODELS = {"post-norm": self_check.post_norm, "pre-norm": self_check.pre_norm}
