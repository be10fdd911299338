"""Native plans of one step, and the same step in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from millpond.models.native import structs
from millpond.models.native.encoder import NativeEncoder, bounds_of
from millpond.models.native.kernels import kernels_of
from millpond.models.native.plan import PlanBuilder
from millpond.native import library

# The precision of each instruction set's own kernels.
PRECISIONS = {
    "avx2": torch.float32,
    "avx512": torch.float32,
    "avx512bf16": torch.bfloat16,
    "amx": torch.bfloat16,
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


def normalized(rows, kind, weight=None, bias=None, epsilon=0.0):
    """A norm over the last dimension, in float64."""
    rows = rows.double()
    if kind == structs.COPY:
        return rows
    center = rows.mean(-1, keepdim=True) if kind == structs.LAYER_NORM else 0.0
    off = rows - center
    result = off / (off.square().mean(-1, keepdim=True) + epsilon).sqrt()
    if weight is not None:
        result = result * weight.double()
    return result if bias is None else result + bias.double()


def activated(numbers, name):
    """An activation by the name of config.json, in float64."""
    numbers = numbers.double()
    match name:
        case None:
            return numbers
        case "gelu":
            return nn.functional.gelu(numbers)
        case "gelu_new":
            return nn.functional.gelu(numbers, approximate="tanh")
        case "silu":
            return nn.functional.silu(numbers)
        case "relu":
            return nn.functional.relu(numbers)
    raise ValueError(name)


def rotated(heads, cosines, sines):
    """Rotary positions of ``heads [tokens, heads, dim]``, in float64."""
    low, high = heads.double().chunk(2, dim=-1)
    cosines, sines = cosines.double()[:, None], sines.double()[:, None]
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)


def attended(
    queries,  # [tokens, heads, dim]
    keys,  # [tokens, kv_heads, dim]
    values,  # [tokens, kv_heads, dim]
    *,
    scale,
    causal=False,
    window=None,
    count=None,
    softcap=None,
    distances=None,  # [heads, 2 reach - 1]
):
    """Attention within one text in float64, and of the magnitudes of the values; 0 for rows without a key."""
    length, heads, _ = queries.shape
    group = heads // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    apart = torch.arange(length) - torch.arange(length)[:, None]  # key - query
    if distances is not None:
        scores = scores + distances.double()[:, apart + (distances.shape[1] + 1) // 2 - 1]
    seen = torch.ones(length, length, dtype=torch.bool)
    if window is not None:
        seen &= apart.abs() < window
    if causal:
        seen &= apart <= 0
    if count is not None:
        seen &= torch.arange(length) < count
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return tuple(torch.einsum("hqk,khd->qhd", weights, part) for part in (values, values.abs()))
