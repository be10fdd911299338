"""Activations of the native encoder: every region of their arguments, and numbers that are none."""

import numpy as np
import pytest
import torch
from tests.native.steps import (
    PRECISIONS,
    ROUNDING,
    assert_near,
    copied,
    encoded,
    encoder_of,
    every_isa,
    given,
    identity,
    linear,
    numbers,
)

from millpond.models.native.self_check import activated

NAMES = ("gelu", "gelu_new", "silu", "relu", None)
every_activation = pytest.mark.parametrize("name", NAMES, ids=str)
# Whose limit at -infinity is 0, as the function's; torch computes infinity times 0 there.
POLYNOMIALS = {("avx512bf16", "gelu"), ("amx", "gelu")}
COLUMNS = 64
# Of the activations alone, absolutely.
ERRORS = {torch.float32: 1e-6, torch.bfloat16: 1e-4}


def mixed(arguments, columns):
    """Rows of arguments, in an order that puts small ones beside large ones."""
    count = len(arguments) // columns * columns
    return arguments[np.random.default_rng(0).permutation(len(arguments))[:count]].reshape(-1, columns)


def dense(dtype):
    """Numbers of every region of [-30, 30], and very small ones."""
    if dtype is torch.bfloat16:  # all of them
        whole = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
        return whole[whole.isfinite() & (whole.abs() <= 30)]
    evenly = torch.linspace(-30, 30, 60_001)
    powers = 2.0 ** torch.linspace(-140, 4.9, 2_000)
    return torch.cat([evenly, powers, -powers])


@every_isa
@every_activation
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_an_activation_is_that_of_torch(isa, name, gated):
    dtype = PRECISIONS[isa]
    rows = mixed(dense(dtype), COLUMNS)
    up, gate = (identity(COLUMNS),), None
    if gated:
        up, gate = (linear(torch.eye(COLUMNS).roll(1, 1)),), identity(COLUMNS)  # times the number beside it
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.mlp(*up, identity(COLUMNS), name, gate=gate),
        lambda b: b.norm(copied(), COLUMNS),
    )
    factors = rows.double().roll(-1, 1) if gated else torch.ones(1)
    expected = activated(rows, name) * factors
    bound = ERRORS[dtype] * factors.abs().clamp(min=1.0) + 1.1 * ROUNDING[dtype] * expected.abs()
    assert_near(encoded(encoder, len(rows)), expected, bound)


@every_isa
@every_activation
def test_infinities_nan_and_huge_numbers_give_what_torch_gives(isa, name):
    dtype = PRECISIONS[isa]
    huge = [1e4, 1e10, 1e25, 1e37, 3e38]
    special = torch.tensor([torch.inf, torch.nan, 0.0, *huge, -torch.inf, -0.0, *(-x for x in huge)])
    rows = torch.zeros(len(special), COLUMNS)
    rows[:, 0] = special
    first = torch.zeros(COLUMNS, COLUMNS)
    first[:, 0] = 1.0
    encoder = encoder_of(
        isa,
        given(rows),
        # Equal columns, whose average is each: a number that is none times 0 would be NaN in the other columns.
        lambda b: b.mlp(linear(first), linear(torch.full((COLUMNS, COLUMNS), 1.0 / COLUMNS)), name),
        lambda b: b.norm(copied(), COLUMNS),
    )
    arguments = special.to(dtype).float()
    expected = activated(arguments, name)
    result = encoded(encoder, len(rows))[:, 0]
    if (isa, name) in POLYNOMIALS:
        expected[arguments == -torch.inf] = 0.0
    assert_near(result, expected, (1.1 * ROUNDING[dtype] + 1e-5) * expected.abs() + ERRORS[dtype])


@every_isa
def test_the_weight_of_a_row_does_not_depend_on_its_neighbours_being_none(isa):
    """A row of NaN leaves the rows beside it as they are."""
    dtype = PRECISIONS[isa]
    rows = numbers((41, COLUMNS), dtype)
    steps = (lambda b: b.mlp(identity(COLUMNS), identity(COLUMNS), "gelu"), lambda b: b.norm(copied(), COLUMNS))
    before = encoded(encoder_of(isa, given(rows), *steps), 41)
    broken = rows.clone()
    broken[::3] = torch.nan
    after = encoded(encoder_of(isa, given(broken), *steps), 41)
    kept = torch.arange(41) % 3 != 0
    assert torch.equal(before[kept], after[kept])
    assert after[~kept].isnan().all()
