"""The encoder in tiles of AMX, emulated, against the kernels that multiply pairs of bfloat16."""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.native.models import built, copied, given, linear, rounded, tokens
from tests.tiles import ROOT, emulated_table, emulates

from millpond.backends.native.encoder import bounds_of
from millpond.backends.native.kernels import kernels_of
from millpond.backends.native.packing.weight_packer import tensor_of
from millpond.backends.native.plans.rotation import Rotation
from millpond.native.library import kernel_table

pytestmark = emulates
# Odd and even numbers of rows around tiles and blocks of tiles.
LENGTHS = {
    "one": [1],
    "small": [1, 2, 15, 16, 17, 31, 32, 33, 50],
    "edges": [16, 16, 32, 64, 1, 1],
    "long": [300, 7],
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return emulated_table(tmp_path_factory.mktemp("tiles"))


def kernels_in(table, int8="none"):
    """Those of tiles, which read weights as the kernels that multiply pairs do."""
    pairs = kernels_of("bfloat16", "avx512bf16", int8=int8)
    assert pairs is not None
    return replace(
        pairs, encode=table.encode_bfloat16, workspace=table.encoder_workspace_bfloat16, isa="amx", tiles=True
    )


@pytest.fixture(scope="module")
def tiles(table):
    return kernels_in(table)


@pytest.fixture(scope="module")
def pairs():
    """The kernels that multiply pairs: the reference, which tests of its own hold to float32 formulas."""
    return kernels_of("bfloat16", "avx512bf16")


class Weights:
    """Random parameters, the same for every encoder of a test."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)

    def numbers(self, *shape, size=1.0):
        return rounded(size * self.random.standard_normal(shape), "bfloat16")

    def linear(self, out, into, bias=True):
        return linear(self.numbers(out, into, size=into**-0.5), self.numbers(out, size=0.3) if bias else None)


def encoder_of(
    kernels,
    *,
    hidden=96,
    heads=3,
    kv_heads=None,
    dim=32,
    inner=160,
    layers=2,
    activation="gelu",
    gated=False,
    prenorm=False,
    rotary=False,
    bias=True,
    positions=512,
    distances=False,
    **attention,
):
    """A random model: post-norm as BERT, or pre-norm as decoders."""
    weights, kv_heads = Weights(), kv_heads or heads

    def model(builder):
        def norm():
            weight = tensor_of(rounded(1 + weights.numbers(hidden, size=0.1), "bfloat16"))
            return builder.rms_norm(weight, 1e-6) if prenorm else builder.layer_norm(weight, None, 1e-6)

        words, places = weights.numbers(200, hidden), weights.numbers(positions, hidden, size=0.5)
        builder.embed(tensor_of(words), tensor_of(places))
        builder.norm(norm(), hidden)
        rotation = Rotation((0.7 ** np.arange(dim // 2)).astype(np.float32))
        for _ in range(layers):
            builder.heads(*(weights.linear(n * dim, hidden, bias) for n in (heads, kv_heads, kv_heads)))
            if rotary:
                builder.rotary(heads=heads, kv_heads=kv_heads, dim=dim, rotation=rotation)
            if distances:
                attention["distances"] = weights.numbers(heads, 2 * positions - 1)
            builder.attention(heads=heads, kv_heads=kv_heads, dim=dim, scale=dim**-0.5, **attention)
            builder.o_proj(weights.linear(hidden, heads * dim, bias), add=prenorm)
            builder.norm(norm(), hidden, residual=not prenorm)
            up, down = weights.linear(inner, hidden, bias), weights.linear(hidden, inner, bias)
            gate = weights.linear(inner, hidden, bias) if gated else None
            builder.mlp(up, down, activation, gate=gate, add=prenorm)
            builder.norm(norm(), hidden, residual=not prenorm)

    return built(kernels, model)


def ids_of(lengths, seed=1):
    return np.random.default_rng(seed).integers(0, 200, sum(lengths)).astype(np.int32)


def assert_close(out, reference, most=0.02):
    """Each row's error is that of rounding to bfloat16, some layers long."""
    assert np.isfinite(out).all()
    error = np.linalg.norm(out - reference, axis=1) / np.linalg.norm(reference, axis=1)
    assert error.max() < most, error.max()


def assert_both_agree(tiles, pairs, lengths, *, call=None, most=0.02, **model):
    ids, bounds, call = ids_of(lengths), bounds_of(lengths), call or {}
    ours, theirs = encoder_of(tiles, **model), encoder_of(pairs, **model)
    reference = theirs.encode(ids, bounds, **call)
    for ours.block in (64, 256):
        for threads in (1, 2):
            assert_close(ours.encode(ids, bounds, threads=threads, **call), reference, most)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"hidden": 32, "heads": 1, "inner": 32}, id="32 wide"),
        pytest.param({"hidden": 96, "heads": 3, "inner": 160}, id="96 wide"),
        pytest.param({"hidden": 384, "heads": 12, "inner": 416, "layers": 1}, id="384 wide"),
        pytest.param({"hidden": 416, "heads": 13, "inner": 800, "layers": 1}, id="416 wide, two parts"),
        pytest.param({"hidden": 128, "heads": 2, "dim": 64, "bias": False}, id="heads of 64"),
        pytest.param({"hidden": 192, "heads": 2, "dim": 96, "layers": 1}, id="heads of 96"),
        pytest.param({"hidden": 128, "heads": 2, "kv_heads": 1, "dim": 128, "layers": 1}, id="heads of 128, grouped"),
        pytest.param({"hidden": 128, "heads": 1, "dim": 160, "layers": 1}, id="heads of 160"),
    ],
)
def test_it_equals_the_kernel_of_pairs(tiles, pairs, model, lengths):
    assert_both_agree(tiles, pairs, lengths, **model)


FAMILIES = [
    pytest.param({"prenorm": True, "rotary": True, "gated": True, "activation": "silu", "causal": True}, id="decoder"),
    pytest.param({"heads": 4, "kv_heads": 2, "causal": True, "window": 5, "prenorm": True}, id="causal window"),
    pytest.param({"window": 1, "activation": "relu"}, id="window of one"),
    pytest.param({"window": 20, "gated": True, "activation": "gelu_new"}, id="window"),
    pytest.param({"softcap": 1.5, "window": 40, "activation": None}, id="softcap"),
    pytest.param({"distances": True}, id="distances"),
    pytest.param({"distances": True, "softcap": 5.0, "dim": 64, "heads": 2, "positions": 300}, id="distances, softcap"),
]


@pytest.mark.parametrize("lengths", [LENGTHS["small"], LENGTHS["long"]], ids=["small", "long"])
@pytest.mark.parametrize("model", FAMILIES)
def test_families(tiles, pairs, model, lengths):
    assert_both_agree(tiles, pairs, lengths, **model)


EIGHT_BITS = [
    pytest.param({"hidden": 32, "heads": 1, "inner": 32}, id="32 wide"),
    pytest.param({"hidden": 96, "inner": 160, "gated": True, "activation": "silu"}, id="gated"),
    pytest.param({"hidden": 416, "heads": 13, "inner": 800, "layers": 1}, id="several ranges"),
    pytest.param({"prenorm": True, "rotary": True, "causal": True, "bias": False}, id="decoder"),
]


@pytest.mark.parametrize("int8", ["feeds", "all"])
@pytest.mark.parametrize("lengths", [LENGTHS["small"], LENGTHS["long"]], ids=["small", "long"])
@pytest.mark.parametrize("model", EIGHT_BITS)
def test_eight_bits(table, model, lengths, int8):
    ours, theirs = kernels_in(table, int8), kernels_of("bfloat16", "avx512bf16", int8=int8)
    # A rounding in another place gives another code, a step of 2^-8 of the range.
    assert_both_agree(ours, theirs, lengths, most=0.04, **model)


def test_products_in_eight_bits_equal_those_of_pairs(table):
    """To the last bit: sums of integers have no rounding, and everything else is the same arithmetic."""
    rows, columns = 50, 416
    weights = Weights()
    states, up, down = weights.numbers(rows, columns), weights.linear(800, columns), weights.linear(columns, 800)
    results = []
    for kernels in (kernels_in(table, "all"), kernels_of("bfloat16", "avx512bf16", int8="all")):
        encoder = built(kernels, given(states), lambda b: b.mlp(up, down, "gelu"), lambda b: b.norm(copied(), columns))
        for encoder.block in (32, 512):
            results += [
                encoder.encode(tokens(count), bounds_of([count]), threads=threads)
                for threads in (1, 2)
                for count in (rows, 17)
            ]
    assert abs(results[0]).max() > 0.1
    assert all(np.array_equal(result, results[0][: len(result)]) for result in results)


@pytest.mark.parametrize("rows", ["first", "last", "mean"])
@pytest.mark.parametrize("lengths", [LENGTHS["small"], LENGTHS["long"]], ids=["small", "long"])
def test_readings(tiles, pairs, rows, lengths):
    assert_both_agree(tiles, pairs, lengths, call={"rows": rows})


def test_keys_that_are_not_attended_to(tiles, pairs):
    lengths = [33, 5, 40, 16, 31, 1]
    keys = np.array([7, 5, 33, 16, 16, 1], dtype=np.int32)
    for window in (None, 4):
        assert_both_agree(tiles, pairs, lengths, call={"keys": keys}, window=window)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"hidden": 96}, id="post-norm"),
        pytest.param({"hidden": 416, "heads": 13, "inner": 800, "layers": 1}, id="two parts"),
        pytest.param({"distances": True, "window": 30}, id="distances"),
        *FAMILIES[:1],
        pytest.param({"hidden": 416, "heads": 13, "inner": 800, "layers": 1, "int8": "all"}, id="eight bits"),
    ],
)
def test_a_row_does_not_depend_on_the_batch(table, model):
    lengths = [1, 15, 33, 300, 16, 64, 2, 31]
    ids, bounds = ids_of(lengths), bounds_of(lengths)
    encoder = encoder_of(kernels_in(table, model.pop("int8", "none")), **model)
    alone = np.concatenate(
        [encoder.encode(ids[start:end].copy(), bounds_of([end - start])) for start, end in pairwise(bounds)]
    )
    for encoder.block in (32, 64, 512):
        for threads in (1, 2, 3):
            assert np.array_equal(encoder.encode(ids, bounds, threads=threads), alone)
    order = np.random.default_rng(3).permutation(len(lengths))
    mixed = encoder.encode(
        np.concatenate([ids[bounds[i] : bounds[i + 1]] for i in order]), bounds_of([lengths[i] for i in order])
    )
    assert np.array_equal(mixed, np.concatenate([alone[bounds[i] : bounds[i + 1]] for i in order]))


def test_rows_behind_the_last_one_change_nothing(tiles):
    """Whole tiles are computed, of whatever an earlier call has left there."""
    encoder = encoder_of(tiles)
    ids = ids_of([17])
    fresh = encoder.encode(ids, bounds_of([17]))
    for workspace in encoder._workspaces:
        workspace.bytes[:] = 0xFF  # NaN
    assert np.array_equal(encoder.encode(ids, bounds_of([17])), fresh)


def test_a_token_that_is_not_a_number_stays_in_its_text(tiles):
    encoder = encoder_of(tiles)
    lengths, ids = [17, 30, 3], np.arange(50, dtype=np.int32)
    expected = encoder.encode(ids, bounds_of(lengths))
    words = ctypes.cast(encoder.plan.model.steps[0].words, ctypes.POINTER(ctypes.c_uint16))
    words[20 * 96] = 0x7FC0  # token 20, of the second text
    out = encoder.encode(ids, bounds_of(lengths))
    assert np.isnan(out[17:47]).all()
    assert np.array_equal(out[:17], expected[:17]) and np.array_equal(out[47:], expected[47:])


@pytest.mark.parametrize("hidden", [32, 384, 768])
def test_blocks_in_tiles_are_long(tiles, pairs, hidden):
    of_tiles, of_pairs = (
        encoder_of(kernels, hidden=hidden, heads=hidden // 32, layers=1).block for kernels in (tiles, pairs)
    )
    assert 384 <= of_tiles <= 512 and of_pairs <= of_tiles


def test_an_instruction_set_below_has_no_tiles():
    assert not kernel_table("avx512bf16").attention_bfloat16
    assert not kernels_of("bfloat16", "avx512bf16").tiles


EXACT_MODELS = [
    {"hidden": 32, "heads": 1, "inner": 32, "layers": 1},
    {"hidden": 416, "heads": 13, "inner": 416, "layers": 1},
    {"hidden": 64, "heads": 2, "kv_heads": 1, "dim": 96, "layers": 1, "prenorm": True, "rotary": True, "gated": True},
    {"hidden": 64, "heads": 1, "dim": 256, "inner": 800, "layers": 1, "causal": True, "window": 9},
    {"hidden": 64, "heads": 2, "layers": 1, "distances": True, "positions": 300},
    {"hidden": 416, "heads": 13, "inner": 800, "layers": 1, "int8": "all"},
]


@pytest.mark.slow
def test_nothing_outside_of_its_memory_is_touched(tmp_path):
    sanitizer = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(sanitizer).is_absolute():
        pytest.skip("the compiler has no AddressSanitizer")
    environment = {
        "LD_PRELOAD": sanitizer,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONMALLOC": "malloc",
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.native.guarded", "tiles", tmp_path],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
