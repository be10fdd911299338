"""Steps of the native encoder against the same in float64."""

import numpy as np
import pytest
import torch
from tests.native.models import (
    PRECISIONS,
    ROUNDING,
    assert_near,
    copied,
    encoded,
    encoder_of,
    every_isa,
    given,
    identity,
    integers,
    linear,
    numbers,
    tokens,
)
from tests.pairwise import pairwise

from millpond.backends.torch.native import structs
from millpond.backends.torch.native.encoder import bounds_of
from millpond.backends.torch.native.self_check import activated, normalized, rotated

# --- Steps of the native encoder but attention and activations, against the same in float64 ---------------------------


# Around the rows of a product's block (6 and 12), a tile (16), a barrier of the layout (32) and a whole feed (64).
ROWS = (1, 2, 5, 6, 7, 12, 13, 16, 31, 33, 63, 64, 65, 97, 200)


@every_isa
@pairwise(with_types=[False, True], with_positions=[False, True], scale=[1.0, 19.6])
def test_embeddings_are_the_sum_of_their_tables(isa, with_types, with_positions, scale):
    dtype, columns, lengths, offset = PRECISIONS[isa], 96, [1, 7, 40, 2], 3
    words, positions, types = (numbers((rows, columns), dtype, seed) for seed, rows in enumerate((50, 43, 3)))
    encoder = encoder_of(
        isa,
        lambda b: b.embed(words, positions if with_positions else None, types if with_types else None, scale),
        lambda b: b.norm(copied(), columns),
        lambda b: b.up_proj(identity(columns)),
        lambda b: b.norm(copied(), columns),
    )
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (sum(lengths),), generator=draw, dtype=torch.int32)
    kinds = torch.randint(0, 3, (sum(lengths),), generator=draw, dtype=torch.int32)
    at = torch.cat([torch.arange(length) for length in lengths]) + offset
    for given_types in (None, kinds):
        result = encoder.encode(
            ids.numpy(),
            bounds_of(lengths),
            offset=offset,
            types=None if given_types is None else given_types.numpy(),
        ).double()
        parts = [words[ids].double() * scale]
        if with_positions:
            parts.append(positions[at].double())
        if with_types:
            parts.append(types[given_types].double() if given_types is not None else types[:1].double())
        magnitude = sum(part.abs() for part in parts)
        assert_near(result, sum(parts), 1.1 * ROUNDING[dtype] * magnitude + 1e-6 * magnitude)


@every_isa
@pairwise(
    columns=[32, 96, 384, 1056],
    affine=["none", "weight", "weight-bias"],
    kind={"layer": structs.LAYER_NORM, "rms": structs.RMS_NORM},
)
def test_a_norm_is_that_of_its_formula(isa, kind, columns, affine):
    dtype, count, epsilon = PRECISIONS[isa], 23, 1e-3
    rows = numbers((count, columns), dtype) * 2.0 ** torch.arange(-5, 18)[:count, None] + 1.5
    rows = rows.to(dtype).float()
    weight = numbers(columns, torch.float32, 1) if "weight" in affine else None
    bias = numbers(columns, torch.float32, 2) if "bias" in affine else None
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.norm(b.norm_weights(kind, weight, bias, epsilon), columns),
        lambda b: b.up_proj(identity(columns)),
        lambda b: b.norm(copied(), columns),
    )
    expected = normalized(rows, kind, weight, bias, epsilon)
    # The mean's own rounding is of the size of the numbers, not of their deviations.
    spread = (rows.double().abs().amax(-1) / (rows.double().std(-1) + epsilon**0.5))[:, None]
    size = torch.ones(columns) if weight is None else weight.abs()
    bound = 1.1 * ROUNDING[dtype] * expected.abs() + 1e-6 * size * spread.clamp(min=1.0) + 1e-6
    assert_near(encoded(encoder, count), expected, bound)


@every_isa
def test_the_residual_of_a_norm_and_what_it_keeps(isa):
    """``residual`` adds the states, ``keep`` replaces the sums, and a branch is added to them after its norm."""
    dtype, count, columns = PRECISIONS[isa], 37, 64
    rows = integers((count, columns), 0) + 2 * integers((count, columns), 1)
    weight = 2.0 ** integers(columns, 2)
    shift = linear(torch.eye(columns).roll(1, 0))  # states -> the number before

    def doubled(b):
        return b.norm_weights(structs.LAYER_NORM, weight, None, 1e-3)

    first = normalized(rows, structs.LAYER_NORM, weight, None, 1e-3)
    rounded = first.to(dtype).double()
    bound = 4 * ROUNDING[dtype] * (1 + first.abs().amax()) * weight.abs().max() + 1e-5

    # sums = states shifted; states = norm(sums + states)
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.norm(doubled(b), columns),
        lambda b: b.up_proj(shift),
        lambda b: b.norm(doubled(b), columns, residual=True),
    )
    expected = normalized(rounded + rounded.roll(1, 1), structs.LAYER_NORM, weight, None, 1e-3)
    assert_near(encoded(encoder, count), expected, 2 * bound)

    # keep: the sums are the norm, and a product of the states is added to them
    for keep in (False, True):
        encoder = encoder_of(
            isa,
            given(rows),
            lambda b, keep=keep: b.norm(doubled(b), columns, keep=keep),
            lambda b: b.heads(shift),
            lambda b: b.o_proj(identity(columns), add=True),
            lambda b: b.norm(copied(), columns),
        )
        expected = rounded.roll(1, 1) + (first if keep else rows.double())
        assert_near(encoded(encoder, count), expected, bound)

    # sums += norm(branch)
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.heads(shift),
        lambda b: b.o_proj(identity(columns), branch=True),
        lambda b: b.norm(doubled(b), columns, branch=True),
        lambda b: b.norm(copied(), columns),
    )
    expected = rows.double() + normalized(rows.roll(1, 1), structs.LAYER_NORM, weight, None, 1e-3)
    assert_near(encoded(encoder, count), expected, bound)


@every_isa
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("into", "out"), [(32, 32), (32, 96), (96, 32), (416, 192), (64, 800)])
def test_products_of_whole_numbers_are_exact(isa, with_bias, into, out):
    """``widen``, ``heads``, and from the heads to the sums, added to them, and to the branch."""
    rows = integers((ROWS[-1], into), 0, 0.5)
    first = linear(integers((out, into), 1, 0.3), integers(out, 2) if with_bias else None)
    second = linear(integers((into, out), 3, 0.1), integers(into, 4) if with_bias else None)
    wide = rows @ first.weight.T + (first.bias if with_bias else 0)
    back = wide @ second.weight.T + (second.bias if with_bias else 0)
    assert max(wide.abs().max(), back.abs().max() + 1) <= 256, "has to be exact in bfloat16"

    encoder = encoder_of(isa, given(rows), lambda b: b.up_proj(first), lambda b: b.norm(copied(), out))
    for count in ROWS:
        assert torch.equal(encoded(encoder, count)[:, :out], wide[:count].double()), count
    copy = copied()
    ways = {
        "sums": ((lambda b: b.o_proj(second),), back),
        "added": ((lambda b: b.o_proj(second, add=True),), rows + back),
        "branch": ((lambda b: b.o_proj(second, branch=True), lambda b: b.norm(copy, into, branch=True)), rows + back),
    }
    for name, (steps, expected) in ways.items():
        encoder = encoder_of(isa, given(rows), lambda b: b.heads(first), *steps, lambda b: b.norm(copied(), into))
        for count in ROWS:
            assert torch.equal(encoded(encoder, count)[:, :into], expected[:count].double()), (name, count)


@every_isa
@pytest.mark.parametrize("parts", [1, 3])
def test_heads_are_the_linear_layers_side_by_side(isa, parts):
    rows = integers((50, 64), 0)
    layers = [linear(integers((32 * (1 + i), 64), 1 + i, 0.5), integers(32 * (1 + i), 9 + i)) for i in range(parts)]
    wide = sum(len(layer.weight) for layer in layers)
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.heads(*layers),
        lambda b: b.o_proj(identity(wide)),
        lambda b: b.norm(copied(), wide),
    )
    expected = torch.cat([rows @ layer.weight.T + layer.bias for layer in layers], dim=1)
    assert torch.equal(encoded(encoder, 50)[:, :wide], expected.double())


@every_isa
@pytest.mark.parametrize("into", [64, 1024, 4096])
def test_a_long_sum_is_as_exact_as_its_precision(isa, into):
    dtype, count = PRECISIONS[isa], 29
    rows, weight = numbers((count, into), dtype), numbers((32, into), dtype, 1)
    encoder = encoder_of(isa, given(rows), lambda b: b.up_proj(linear(weight)), lambda b: b.norm(copied(), 32))
    expected, magnitude = (a.double() @ b.double().T for a, b in ((rows, weight), (rows.abs(), weight.abs())))
    result = encoded(encoder, count)[:, :32]
    assert_near(result, expected, 1.1 * ROUNDING[dtype] * expected.abs() + 1e-6 * magnitude)


@every_isa
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("inner", [32, 384, 416, 1152])
def test_a_feed_of_whole_numbers_is_exact(isa, gated, inner):
    """ReLU keeps whole numbers; the inner columns are cut into pieces of 384 if there are many rows."""
    columns = 64
    rows = integers((ROWS[-1], columns), 0, 0.1)
    up, gate = (linear(integers((inner, columns), seed, 0.2), integers(inner, seed + 1)) for seed in (1, 3))
    down = linear(integers((columns, inner), 5, 0.03), integers(columns, 6))
    wide = [rows @ layer.weight.T + layer.bias for layer in (up, gate)]
    hidden = wide[1].relu() * wide[0] if gated else wide[0].relu()
    result = hidden @ down.weight.T + down.bias
    assert max(hidden.abs().max(), result.abs().max() + 1) <= 256
    copy = copied()
    ways = {
        "sums": ({}, (), result),
        "added": ({"add": True}, (), rows + result),
        "branch": ({"branch": True}, (lambda b: b.norm(copy, columns, branch=True),), rows + result),
    }
    for name, (target, steps, expected) in ways.items():
        encoder = encoder_of(
            isa,
            given(rows),
            lambda b, target=target: b.mlp(up, down, "relu", gate=gate if gated else None, **target),
            *steps,
            lambda b: b.norm(copied(), columns),
        )
        for count in ROWS:
            assert torch.equal(encoded(encoder, count), expected[:count].double()), (name, count)


@every_isa
@pytest.mark.parametrize("name", ["gelu", "gelu_new", "silu", "relu", None], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_feed_of_any_numbers(isa, name, gated):
    dtype, count, columns, inner = PRECISIONS[isa], 77, 96, 448
    rows = numbers((count, columns), dtype)
    up, gate = (linear(numbers((inner, columns), dtype, s, 0.3), numbers(inner, dtype, s + 1)) for s in (1, 3))
    down = linear(numbers((columns, inner), dtype, 5, 0.05), numbers(columns, dtype, 6))
    wide = [rows.double() @ layer.weight.double().T + layer.bias.double() for layer in (up, gate)]
    hidden = activated(wide[1], name) * wide[0] if gated else activated(wide[0], name)
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.mlp(up, down, name, gate=gate if gated else None),
        lambda b: b.norm(copied(), columns),
    )
    expected = hidden @ down.weight.double().T + down.bias.double()
    size = torch.maximum(hidden.abs(), wide[0].abs()) @ down.weight.double().abs().T
    assert_near(encoded(encoder, count), expected, (1.1 * ROUNDING[dtype] + 2e-6) * (size + expected.abs()))


@every_isa
@pairwise(
    shape=[(2, 2, 32), (3, 1, 64), (2, 1, 96), (1, 1, 128), (4, 2, 256)], norms=[False, True], turns=[False, True]
)
def test_query_and_key_heads_are_normalized_and_rotated(isa, shape, norms, turns):
    heads, kv_heads, dim = shape
    dtype, lengths, offset = PRECISIONS[isa], [1, 30, 3], 5
    columns, count = (heads + 2 * kv_heads) * dim, sum(lengths)
    rows = numbers((count, columns), dtype)
    angles = numbers((35, dim // 2), torch.float32, 1, 3.0)
    weights = [1 + numbers(dim, torch.float32, seed, 0.3) for seed in (2, 3)]
    cosines, sines = (angles.cos(), angles.sin()) if turns else (None, None)
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.heads(identity(columns)),
        lambda b: b.rotary(
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            norm=b.norm_weights(structs.RMS_NORM, weights[0], None, 1e-5) if norms else None,
            key_norm=b.norm_weights(structs.RMS_NORM, weights[1], None, 1e-5) if norms else None,
            cosines=cosines,
            sines=sines,
        ),
        lambda b: b.o_proj(identity(columns)),
        lambda b: b.norm(copied(), columns),
    )
    parts = list(rows.double().unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1))
    if norms:
        parts[:2] = [normalized(part, structs.RMS_NORM, w, None, 1e-5) for part, w in zip(parts, weights, strict=False)]
    if turns:
        at = torch.cat([torch.arange(length) for length in lengths]) + offset
        parts[:2] = [rotated(part, cosines[at], sines[at]) for part in parts[:2]]
    expected = torch.cat(parts, dim=1).flatten(1)
    result = encoder.encode(tokens(count), bounds_of(lengths), offset=offset).double()
    assert_near(result, expected, 1.1 * ROUNDING[dtype] * expected.abs() + 2e-6 * expected.abs().max())


# --- Activations of the native encoder: every region of their arguments, and numbers that are none --------------------


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
