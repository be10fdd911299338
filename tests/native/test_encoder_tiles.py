"""The encoder in tiles, with the tile instructions of AMX emulated, against the kernel that multiplies pairs of bfloat16."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from millpond.models.native import structs
from millpond.models.native.encoder import NativeEncoder, bounds_of
from millpond.models.native.plan import Kernels, PlanBuilder, kernels_of
from millpond.native.library import ISAS, KernelTable, isa

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src/millpond/native"
EMULATION = ROOT / "tests/native/amx_emulation.h"
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or isa() not in ISAS[2:], reason="needs g++ and a processor with AVX512-BF16"
)
# Odd and even numbers of rows around tiles and blocks of tiles.
LENGTHS = {
    "one": [1],
    "small": [1, 2, 15, 16, 17, 31, 32, 33, 50],
    "edges": [16, 16, 32, 64, 1, 1],
    "long": [300, 7],
}


def flags(hook):
    """The flags of the kernels for AMX, with the tile instructions emulated."""
    source = NATIVE / "x86_amx/encoder.cpp"
    return [*hook._OPTIONS, *hook.compiler_flags(source), "-include", str(EMULATION)]


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("hatchling")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        import hatch_build

        yield hatch_build


@pytest.fixture(scope="module")
def table(hook, tmp_path_factory):
    """The entries of the table that the kernels for AMX set, emulated."""
    folder = tmp_path_factory.mktemp("tiles")
    source = folder / "fill.cpp"
    source.write_text(
        f'#include "{NATIVE}/x86_amx/encoder.cpp"\n#include "{NATIVE}/parallel.cpp"\n'
        'extern "C" void fill(KernelTable* table) { millpond_add_encoder_amx(table); }\n'
    )
    library = folder / "emulated.so"
    subprocess.run(["g++", *flags(hook), "-shared", "-o", library, source], check=True)
    table = KernelTable()
    ctypes.CDLL(str(library)).fill(ctypes.byref(table))
    return table


@pytest.fixture(scope="module")
def tiles(table):
    return Kernels(
        pack=table.pack_weight_bfloat16,
        encode=table.encode_bfloat16,
        workspace=table.encoder_workspace_bfloat16,
        lanes=16,
    )


@pytest.fixture(scope="module")
def pairs():
    """The kernels that multiply pairs: the reference, which tests of its own hold to float32 formulas."""
    kernels = kernels_of(torch.bfloat16, "avx512bf16")
    assert kernels is not None
    return kernels


class Weights:
    """Random parameters, the same for every encoder of a test."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def numbers(self, *shape, size=1.0):
        return (size * torch.randn(*shape, generator=self.generator)).bfloat16().float()

    def linear(self, out, into, bias=True):
        return SimpleNamespace(
            weight=self.numbers(out, into, size=into**-0.5), bias=self.numbers(out, size=0.3) if bias else None
        )


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
    builder = PlanBuilder(kernels, torch.bfloat16)
    norm = lambda: builder.norm_weights(  # noqa: E731
        structs.RMS_NORM if prenorm else structs.LAYER_NORM, 1 + weights.numbers(hidden, size=0.1), None, 1e-6
    )
    builder.embed(weights.numbers(200, hidden), weights.numbers(positions, hidden, size=0.5))
    builder.norm(norm(), hidden)
    angles = torch.arange(positions)[:, None] * 0.7 ** torch.arange(dim // 2)
    for layer in range(layers):
        builder.heads(*(weights.linear(n * dim, hidden, bias) for n in (heads, kv_heads, kv_heads)))
        if rotary:
            builder.turn(heads=heads, kv_heads=kv_heads, dim=dim, cosines=angles.cos(), sines=angles.sin())
        if distances:
            attention["distances"] = weights.numbers(heads, 2 * positions - 1)
        builder.attention(
            heads=heads, kv_heads=kv_heads, dim=dim, scale=dim**-0.5, last=layer == layers - 1, **attention
        )
        builder.out(weights.linear(hidden, heads * dim, bias), add=prenorm)
        builder.norm(norm(), hidden, residual=not prenorm)
        up, down = weights.linear(inner, hidden, bias), weights.linear(hidden, inner, bias)
        builder.feed(up, down, activation, gate=weights.linear(inner, hidden, bias) if gated else None, add=prenorm)
        builder.norm(norm(), hidden, residual=not prenorm)
    return NativeEncoder(builder.build())


def ids_of(lengths, seed=1):
    return np.random.default_rng(seed).integers(0, 200, sum(lengths)).astype(np.int32)


def assert_close(out, reference):
    """Each row's error is that of rounding to bfloat16, some layers long."""
    assert out.isfinite().all()
    error = (out - reference).norm(dim=1) / reference.norm(dim=1)
    assert error.max() < 0.02, error.max()


def assert_both_agree(tiles, pairs, lengths, *, block=None, call=None, **model):
    ids, bounds, call = ids_of(lengths), bounds_of(lengths), call or {}
    ours, theirs = encoder_of(tiles, **model), encoder_of(pairs, **model)
    reference = theirs.encode(ids, bounds, **call)
    for ours.block in [block] if block else [64, 256]:
        for threads in (1, 2):
            assert_close(ours.encode(ids, bounds, threads=threads, **call), reference)


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
