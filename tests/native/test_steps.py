"""Steps of the native encoder against the same in float64."""

import numpy as np
import pytest
from tests.native.models import (
    PRECISIONS,
    ROUNDING,
    assert_near,
    built,
    copied,
    encoded,
    encoder_of,
    every_isa,
    given,
    identity,
    integers,
    linear,
    numbers,
    product,
    rounded,
    tokens,
)
from tests.pairwise import pairwise

from millpond.backends.native import structs
from millpond.backends.native.encoder import bounds_of
from millpond.backends.native.formulas import Inputs, activated, formulas, normalized, read, rotated
from millpond.backends.native.kernels import kernels_of
from millpond.backends.native.packing.weight_packer import tensor_of
from millpond.backends.native.plans.plan import Expert
from millpond.backends.native.plans.rotation import Rotation

# --- Steps of the native encoder but attention and activations, against the same in float64 ---------------------------


# Around the rows of a product's block (6 and 12), a tile (16), a barrier of the layout (32) and a whole feed (64).
ROWS = (1, 2, 5, 6, 7, 12, 13, 16, 31, 33, 63, 64, 65, 97, 200)


@every_isa
@pairwise(with_types=[False, True], with_positions=[False, True], scale=[1.0, 19.6])
def test_embeddings_are_the_sum_of_their_tables(isa, with_types, with_positions, scale):
    dtype, columns, lengths, offset = PRECISIONS[isa], 96, [1, 7, 40, 2], 3
    words, positions, types = (numbers((rows, columns), dtype, seed) for seed, rows in enumerate((50, 43, 3)))
    tables = [
        tensor_of(words),
        tensor_of(positions) if with_positions else None,
        tensor_of(types) if with_types else None,
    ]
    encoder = encoder_of(
        isa,
        lambda b: b.embed(*tables, scale=scale),
        lambda b: b.norm(copied(), columns),
        lambda b: b.up_proj(identity(columns)),
        lambda b: b.norm(copied(), columns),
    )
    random = np.random.default_rng(0)
    ids, kinds = (random.integers(0, rows, sum(lengths)).astype(np.int32) for rows in (50, 3))
    at = np.concatenate([np.arange(length) for length in lengths]) + offset
    for given_types in (None, kinds):
        result = encoder.encode(ids, bounds_of(lengths), offset=offset, types=given_types).astype(float)
        parts = [words[ids].astype(float) * scale]
        if with_positions:
            parts.append(positions[at].astype(float))
        if with_types:
            parts.append(types[0 if given_types is None else given_types].astype(float))
        magnitude = sum(abs(part) for part in parts)
        assert_near(result, sum(parts), 1.1 * ROUNDING[dtype] * magnitude + 1e-6 * magnitude)


def norm_weights(builder, kind, weight, bias, epsilon):
    weight, bias = (None if part is None else tensor_of(part) for part in (weight, bias))
    if kind == structs.LAYER_NORM:
        return builder.layer_norm(weight, bias, epsilon)
    return builder.rms_norm(weight, epsilon)


@every_isa
@pairwise(
    columns=[32, 96, 384, 1056],
    affine=["none", "weight", "weight-bias"],
    kind={"layer": structs.LAYER_NORM, "rms": structs.RMS_NORM},
)
def test_a_norm_is_that_of_its_formula(isa, kind, columns, affine):
    dtype, count, epsilon = PRECISIONS[isa], 23, 1e-3
    rows = rounded(numbers((count, columns), dtype) * 2.0 ** np.arange(-5, 18)[:count, None] + 1.5, dtype)
    weight = numbers(columns, "float32", 1) if "weight" in affine else None
    bias = numbers(columns, "float32", 2) if "bias" in affine and kind == structs.LAYER_NORM else None
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.norm(norm_weights(b, kind, weight, bias, epsilon), columns),
        lambda b: b.up_proj(identity(columns)),
        lambda b: b.norm(copied(), columns),
    )
    weight, bias = (None if part is None else rounded(part, dtype).astype(float) for part in (weight, bias))
    expected = normalized(rows.astype(float), kind, weight, bias, epsilon)
    # The mean's own rounding is of the size of the numbers, not of their deviations.
    spread = (abs(rows).max(-1) / (rows.std(-1, dtype=float) + epsilon**0.5))[:, None]
    size = np.ones(columns) if weight is None else abs(weight)
    bound = 1.1 * ROUNDING[dtype] * abs(expected) + 1e-6 * size * np.maximum(spread, 1.0) + 1e-6
    assert_near(encoded(encoder, count), expected, bound)


@every_isa
def test_the_residual_of_a_norm_and_what_it_keeps(isa):
    """``residual`` adds the states, ``keep`` replaces the sums, and a branch is added to them after its norm."""
    dtype, count, columns = PRECISIONS[isa], 37, 64
    rows = integers((count, columns), 0) + 2 * integers((count, columns), 1)
    weight = 2.0 ** integers(columns, 2)
    shift = linear(np.roll(np.eye(columns), 1, 0))  # states -> the number before

    def doubled(b):
        return b.layer_norm(tensor_of(weight), None, 1e-3)

    first = normalized(rows.astype(float), structs.LAYER_NORM, weight, None, 1e-3)
    near = rounded(first, dtype).astype(float)
    bound = 4 * ROUNDING[dtype] * (1 + abs(first).max()) * weight.max() + 1e-5

    # sums = states shifted; states = norm(sums + states)
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.norm(doubled(b), columns),
        lambda b: b.up_proj(shift),
        lambda b: b.norm(doubled(b), columns, residual=True),
    )
    expected = normalized(near + np.roll(near, 1, 1), structs.LAYER_NORM, weight, None, 1e-3)
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
        expected = np.roll(near, 1, 1) + (first if keep else rows)
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
    expected = rows + normalized(np.roll(rows, 1, 1).astype(float), structs.LAYER_NORM, weight, None, 1e-3)
    assert_near(encoded(encoder, count), expected, bound)


@every_isa
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("into", "out"), [(32, 32), (32, 96), (96, 32), (416, 192), (64, 800)])
def test_products_of_whole_numbers_are_exact(isa, with_bias, into, out):
    """``widen``, ``heads``, and from the heads to the sums, added to them, and to the branch."""
    rows = integers((ROWS[-1], into), 0, 0.5)
    first = linear(integers((out, into), 1, 0.3), integers(out, 2) if with_bias else None)
    second = linear(integers((into, out), 3, 0.1), integers(into, 4) if with_bias else None)
    wide = product(rows, first)
    back = product(wide, second)
    assert max(abs(wide).max(), abs(back).max() + 1) <= 256, "has to be exact in bfloat16"

    encoder = encoder_of(isa, given(rows), lambda b: b.up_proj(first), lambda b: b.norm(copied(), out))
    for count in ROWS:
        np.testing.assert_array_equal(encoded(encoder, count), wide[:count])
    copy = copied()
    ways = {
        "sums": ((lambda b: b.o_proj(second),), back),
        "added": ((lambda b: b.o_proj(second, add=True),), rows + back),
        "branch": ((lambda b: b.o_proj(second, branch=True), lambda b: b.norm(copy, into, branch=True)), rows + back),
    }
    for name, (steps, expected) in ways.items():
        encoder = encoder_of(isa, given(rows), lambda b: b.heads(first), *steps, lambda b: b.norm(copied(), into))
        for count in ROWS:
            np.testing.assert_array_equal(encoded(encoder, count), expected[:count], err_msg=name)


@every_isa
@pytest.mark.parametrize("parts", [1, 3])
def test_heads_are_the_linear_layers_side_by_side(isa, parts):
    rows = integers((50, 64), 0)
    layers = [linear(integers((32 * (1 + i), 64), 1 + i, 0.5), integers(32 * (1 + i), 9 + i)) for i in range(parts)]
    wide = sum(layer.weight.shape[0] for layer in layers)
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.heads(*layers),
        lambda b: b.o_proj(identity(wide)),
        lambda b: b.norm(copied(), wide),
    )
    np.testing.assert_array_equal(encoded(encoder, 50), np.hstack([product(rows, layer) for layer in layers]))


@every_isa
@pytest.mark.parametrize("into", [64, 1024, 4096])
def test_a_long_sum_is_as_exact_as_its_precision(isa, into):
    dtype, count = PRECISIONS[isa], 29
    rows, weight = numbers((count, into), dtype), numbers((32, into), dtype, 1)
    encoder = encoder_of(isa, given(rows), lambda b: b.up_proj(linear(weight)), lambda b: b.norm(copied(), 32))
    expected, magnitude = (a.astype(float) @ b.astype(float).T for a, b in ((rows, weight), (abs(rows), abs(weight))))
    assert_near(encoded(encoder, count), expected, 1.1 * ROUNDING[dtype] * abs(expected) + 1e-6 * magnitude)


@every_isa
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("inner", [32, 384, 416, 1152])
def test_a_feed_of_whole_numbers_is_exact(isa, gated, inner):
    """ReLU keeps whole numbers; the inner columns are cut into pieces of 384 if there are many rows."""
    columns = 64
    rows = integers((ROWS[-1], columns), 0, 0.1)
    up, gate = (linear(integers((inner, columns), seed, 0.2), integers(inner, seed + 1)) for seed in (1, 3))
    down = linear(integers((columns, inner), 5, 0.03), integers(columns, 6))
    wide = [product(rows, layer) for layer in (up, gate)]
    hidden = np.maximum(wide[1], 0) * wide[0] if gated else np.maximum(wide[0], 0)
    result = product(hidden, down)
    assert max(abs(hidden).max(), abs(result).max() + 1) <= 256
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
            np.testing.assert_array_equal(encoded(encoder, count), expected[:count], err_msg=name)


@every_isa
@pytest.mark.parametrize("name", ["gelu", "gelu_new", "silu", "relu", None], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_feed_of_any_numbers(isa, name, gated):
    dtype, count, columns, inner = PRECISIONS[isa], 77, 96, 448
    rows = numbers((count, columns), dtype)
    up, gate = (linear(numbers((inner, columns), dtype, s, 0.3), numbers(inner, dtype, s + 1)) for s in (1, 3))
    down = linear(numbers((columns, inner), dtype, 5, 0.05), numbers(columns, dtype, 6))
    wide = [product(rows, layer) for layer in (up, gate)]
    hidden = activated(wide[1], name) * wide[0] if gated else activated(wide[0], name)
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.mlp(up, down, name, gate=gate if gated else None),
        lambda b: b.norm(copied(), columns),
    )
    expected = product(hidden, down)
    size = np.maximum(abs(hidden), abs(wide[0])) @ abs(down.weight.float32().astype(float)).T
    assert_near(encoded(encoder, count), expected, (1.1 * ROUNDING[dtype] + 2e-6) * (size + abs(expected)))


@every_isa
@pairwise(
    shape=[(2, 2, 32), (3, 1, 64), (2, 1, 96), (1, 1, 128), (4, 2, 256)], norms=[False, True], turns=[False, True]
)
def test_query_and_key_heads_are_normalized_and_rotated(isa, shape, norms, turns):
    heads, kv_heads, dim = shape
    dtype, lengths, offset = PRECISIONS[isa], [1, 30, 3], 5
    columns, count = (heads + 2 * kv_heads) * dim, sum(lengths)
    rows = numbers((count, columns), dtype)
    rotation = Rotation(numbers(dim // 2, "float32", 1, 3.0)) if turns else None
    weights = [1 + numbers(dim, dtype, seed, 0.25) for seed in (2, 3)]
    weights = [rounded(weight, dtype) for weight in weights]
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.heads(identity(columns)),
        lambda b: b.rotary(
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            norm=b.rms_norm(tensor_of(weights[0]), 1e-5) if norms else None,
            key_norm=b.rms_norm(tensor_of(weights[1]), 1e-5) if norms else None,
            rotation=rotation,
        ),
        lambda b: b.o_proj(identity(columns)),
        lambda b: b.norm(copied(), columns),
    )
    parts = np.split(rows.astype(float).reshape(count, -1, dim), [heads, heads + kv_heads], axis=1)
    if norms:
        parts[:2] = [normalized(part, structs.RMS_NORM, w, None, 1e-5) for part, w in zip(parts, weights, strict=False)]
    if turns:
        at = np.concatenate([np.arange(length) for length in lengths]) + offset
        tables = [table[at] for table in rotation.tables(35)]
        parts[:2] = [rotated(part, *tables) for part in parts[:2]]
    expected = np.concatenate(parts, axis=1).reshape(count, -1)
    result = encoder.encode(tokens(count), bounds_of(lengths), offset=offset).astype(float)
    assert_near(result, expected, 1.1 * ROUNDING[dtype] * abs(expected) + 2e-6 * abs(expected).max())


@every_isa
@pairwise(taps=[1, 2, 3, 8], ahead=[0, 1, 7], width=[12, 32, 96], limited=[False, True], rows=["all", "first", "last"])
def test_a_convolution_stays_within_its_text(isa, taps, ahead, width, limited, rows):
    """Between its two gates, of the first rows of each text only (``limited``), of texts shorter than its reach too."""
    dtype, lengths, ahead = PRECISIONS[isa], [1, 2, 40, 3, 9], min(ahead, taps - 1)
    keys = np.array([1, 1, 33, 3, 5] if limited else lengths, np.int32)
    count = sum(lengths)
    states = rounded(numbers((count, width), dtype), dtype)
    layers = [linear(rounded(numbers((width, width), dtype, seed) * width**-0.5, dtype)) for seed in (1, 2, 3)]
    weights = rounded(numbers((width, 1, taps), dtype, 4), dtype)
    encoder = encoder_of(
        isa,
        given(states),
        lambda b: b.heads(*layers, dim=width),
        lambda b: b.convolve(tensor_of(weights), ahead=ahead),
        lambda b: b.o_proj(linear(np.eye(width)), add=True),
        lambda b: b.norm(copied(), width),
    )
    before, behind, values = (rounded(product(states, layer), dtype).astype(float) for layer in layers)
    expected, size = states.astype(float), np.zeros((count, width))
    first = 0
    for length, used in zip(lengths, keys, strict=True):
        for i in range(used):
            for k in range(taps):
                other = i + k - (taps - 1 - ahead)
                if 0 <= other < used:
                    part = before[first + other] * values[first + other] * weights[:, 0, k] * behind[first + i]
                    expected[first + i] += part
                    size[first + i] += abs(part)
        first += length
    read = {"all": slice(None), "first": bounds_of(lengths)[:-1], "last": bounds_of(lengths)[1:] - 1}[rows]
    found = encoded(encoder, count, lengths, keys=keys if limited else None, rows=rows)
    assert_near(found, expected[read], (8 * ROUNDING[dtype] + 2e-6) * (1 + size + abs(states))[read])


@every_isa
@pairwise(dim=[12, 32, 40], heads=[1, 5], sums=[False, True])
def test_all_heads_are_normalized_as_one_row(isa, dim, heads, sums):
    """Also where the kernels compute more columns of each head; ``sums``: a norm that leaves the states alone."""
    dtype, count, width = PRECISIONS[isa], 13, heads * dim
    rows = rounded(numbers((count, width), dtype) * 2 + 3.0, dtype)
    weights = [tensor_of(rounded(numbers(width, dtype, seed), dtype)) for seed in range(4)]
    layers = [linear(rounded(numbers((width, width), dtype, seed) * width**-0.5, dtype)) for seed in (5, 6, 7)]

    def normed(b):
        norms = [b.layer_norm(*weights[i : i + 2], 1e-3, dim=dim) for i in (0, 2)]
        b.rotary(heads=heads, kv_heads=heads, dim=dim, norm=norms[0], key_norm=norms[1], whole=True)

    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.heads(*layers, dim=dim),
        normed,
        lambda b: b.o_proj(linear(np.eye(width)), dim=dim),
        lambda b: b.norm(b.rms_norm(tensor_of(np.ones(width)), 1e-3), width, residual=True, sums=sums),
        *([lambda b: b.norm(copied(), width, residual=True)] if sums else []),
    )
    query = product(rows, layers[0])
    first, shift = (part.float32().astype(float) for part in weights[:2])
    normal = normalized(query, structs.LAYER_NORM, first, shift, 1e-3)
    total = normal + rows
    expected = normalized(total, structs.RMS_NORM, None, None, 1e-3) + (rows if sums else 0)
    assert_near(encoded(encoder, count), expected, (40 * ROUNDING[dtype] + 1e-6) * (1 + abs(total) + abs(rows)))


@every_isa
@pairwise(
    gated=[False, True], renormalized=[False, True], top=[1, 2, 5], columns=[40, 64], count=[5, 33], threads=[1, 2]
)
def test_a_mixture_is_the_weighted_sum_of_what_a_row_s_experts_give(
    isa, gated, renormalized, top, columns, count, threads
):
    """In float32: in less a choice may be another one. Some experts have no row, and some texts no more than one."""
    inner, lengths = 400, [3, 61, 150, 1]
    words = numbers((sum(lengths), columns), "float32")

    def layer(out, into, seed):
        return linear(numbers((out, into), "float32", seed) * into**-0.5)

    def model(builder, dtype="float32"):
        builder.embed(tensor_of(words))
        builder.norm(copied(), columns)
        feeds = [
            Expert(
                up=layer(inner, columns, 3 * e + 2),
                down=layer(columns, inner, 3 * e + 3),
                gate=layer(inner, columns, 3 * e + 4) if gated else None,
            )
            for e in range(count)
        ]
        bias = tensor_of(numbers(columns, "float32", 9))
        router = layer(count, columns, 1)
        builder.experts(router, feeds, "silu", top=top, renormalized=renormalized, bias=bias)
        builder.norm(copied(), columns)

    kernels = kernels_of("float32", isa)
    encoder = built(kernels, model)
    ids = tokens(sum(lengths))
    expected = formulas(model, "float32", Inputs(lengths=lengths, ids=ids))
    assert_near(encoder.encode(ids, bounds_of(lengths), threads=threads), expected, 2e-5 * abs(expected).max())


# --- Activations of the native encoder: every region of their arguments, and numbers that are none --------------------


NAMES = ("gelu", "gelu_new", "silu", "relu", None)
every_activation = pytest.mark.parametrize("name", NAMES, ids=str)
# Whose limit at -infinity is 0, as the function's; the formula computes infinity times 0 there.
POLYNOMIALS = {(isa, "gelu") for isa, dtype in PRECISIONS.items() if dtype == "bfloat16"}
COLUMNS = 64
# Of the activations alone, absolutely.
ERRORS = {"float32": 1e-6, "bfloat16": 1e-4}


def mixed(arguments, columns):
    """Rows of arguments, in an order that puts small ones beside large ones."""
    count = len(arguments) // columns * columns
    return arguments[np.random.default_rng(0).permutation(len(arguments))[:count]].reshape(-1, columns)


def dense(dtype):
    """Numbers of every region of [-30, 30], and very small ones."""
    if dtype == "bfloat16":  # all of them
        whole = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):
            return whole[abs(whole) <= 30]
    evenly = np.linspace(-30, 30, 60_001)
    powers = 2.0 ** np.linspace(-140, 4.9, 2_000)
    return np.concatenate([evenly, powers, -powers]).astype(np.float32)


@every_isa
@every_activation
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_an_activation_is_that_of_its_formula(isa, name, gated):
    dtype = PRECISIONS[isa]
    rows = mixed(dense(dtype), COLUMNS)
    up, gate = (identity(COLUMNS),), None
    if gated:
        up, gate = (linear(np.roll(np.eye(COLUMNS), 1, 1)),), identity(COLUMNS)  # times the number beside it
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.mlp(*up, identity(COLUMNS), name, gate=gate),
        lambda b: b.norm(copied(), COLUMNS),
    )
    factors = np.roll(rows.astype(float), -1, 1) if gated else np.ones(1)
    expected = activated(rows.astype(float), name) * factors
    bound = ERRORS[dtype] * np.maximum(abs(factors), 1.0) + 1.1 * ROUNDING[dtype] * abs(expected)
    assert_near(encoded(encoder, len(rows)), expected, bound)


@every_isa
@every_activation
def test_infinities_nan_and_huge_numbers_give_what_the_formula_gives(isa, name):
    dtype = PRECISIONS[isa]
    huge = [1e4, 1e10, 1e25, 1e37, 3e38]
    special = rounded([np.inf, np.nan, 0.0, *huge, -np.inf, -0.0, *(-x for x in huge)], dtype)
    rows = np.zeros((len(special), COLUMNS), np.float32)
    rows[:, 0] = special
    first = np.zeros((COLUMNS, COLUMNS))
    first[:, 0] = 1.0
    encoder = encoder_of(
        isa,
        given(rows),
        # Equal columns, whose average is each: a number that is none times 0 would be NaN in the other columns.
        lambda b: b.mlp(linear(first), linear(np.full((COLUMNS, COLUMNS), 1.0 / COLUMNS)), name),
        lambda b: b.norm(copied(), COLUMNS),
    )
    with np.errstate(invalid="ignore"):
        expected = activated(special.astype(float), name)
    result = encoded(encoder, len(rows))[:, 0]
    if (isa, name) in POLYNOMIALS:
        expected[special == -np.inf] = 0.0
    assert_near(result, expected, (1.1 * ROUNDING[dtype] + 1e-5) * abs(expected) + ERRORS[dtype])


@every_isa
def test_the_weight_of_a_row_does_not_depend_on_its_neighbours_being_none(isa):
    """A row of NaN leaves the rows beside it as they are."""
    dtype = PRECISIONS[isa]
    rows = numbers((41, COLUMNS), dtype)
    steps = (lambda b: b.mlp(identity(COLUMNS), identity(COLUMNS), "gelu"), lambda b: b.norm(copied(), COLUMNS))
    before = encoded(encoder_of(isa, given(rows), *steps), 41)
    broken = rows.copy()
    broken[::3] = np.nan
    after = encoded(encoder_of(isa, given(broken), *steps), 41)
    kept = np.arange(41) % 3 != 0
    np.testing.assert_array_equal(before[kept], after[kept])
    assert np.isnan(after[~kept]).all()


@every_isa
@pairwise(
    rows=["all", "first", "last", "mean"], threads=[1, 2], shares=[(0.25, -0.5, 0.75, 0.5), (0.0, 1.5, -0.5, 0.0)]
)
def test_the_result_is_a_sum_of_the_layers_states(isa, rows, threads, shares):
    dtype, columns, lengths = PRECISIONS[isa], 96, [3, 61, 150, 1]
    words = numbers((sum(lengths), columns), dtype)

    def model(builder, dtype=dtype):
        builder.embed(tensor_of(words))
        builder.norm(copied(), columns)
        for i, share in enumerate(shares):
            if i > 0:
                heads = [linear(numbers((columns, columns), dtype, 4 * i + j) * columns**-0.5) for j in range(4)]
                builder.heads(*heads[:3])
                builder.attention(heads=3, kv_heads=3, dim=32, scale=32**-0.5)
                builder.o_proj(heads[3])
                builder.norm(copied(), columns, residual=True)
            if share or i == len(shares) - 1:
                builder.blend(share, begins=not any(shares[:i]), ends=i == len(shares) - 1)

    encoder, ids = built(kernels_of(dtype, isa), model), tokens(sum(lengths))
    expected = read(formulas(model, dtype, Inputs(lengths=lengths, ids=ids)), lengths, rows)
    result = encoder.encode(ids, bounds_of(lengths), rows=rows, threads=threads)
    assert_near(result, expected, (1e-5 if dtype == "float32" else 0.06) * np.abs(expected).max())
