"""Every variant in torch's operators and in each instruction set beside transformers' classes; precision and memory."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
from typing import Any

import numpy as np
import pytest
import torch
from tests.native.models import (
    DECODERS,
    EACH_LENGTH,
    LENGTHS,
    NATIVE,
    SLOW,
    TARGETS,
    TOLERANCE,
    TORCH_ONLY,
    VARIANTS,
    VISIBLE,
    apart,
    assert_same_direction,
    backbone,
    compiled,
    difference,
    expected_states,
    native_states,
    plain,
    plan_of,
    states,
)
from tests.pairwise import pairwise
from torch import nn

from millpond.backends.torch import placement
from millpond.backends.torch.forwards import decoder
from millpond.backends.torch.forwards.decoder import PackedDecoder
from millpond.backends.torch.forwards.int8 import Int8Linear
from millpond.backends.torch.forwards.linear import PlainLinear, ReorderedLinear
from millpond.backends.torch.forwards.rms_norm import RMSNorm
from millpond.backends.torch.load import packed_forward
from millpond.backends.torch.native.memory import Memory
from millpond.backends.torch.native.weight_packer import NotSupported
from millpond.backends.torch.threads import _multiplied_weights
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import row_of
from millpond.native import library, precision

# --- Every variant in torch's operators and in each instruction set beside transformers' classes; what they hold ------


# --- Every variant in torch's operators and in each instruction set, compared with transformers' classes --------------


def marked(names: Any, contract: Any = ()) -> list[Any]:
    marks = [
        (name, pytest.mark.slow if name in SLOW else pytest.mark.contract if name in contract else ()) for name in names
    ]
    return [pytest.param(name, marks=mark) for name, mark in marks]


@pytest.mark.parametrize("variant", marked(VARIANTS, contract=VARIANTS.keys() - DECODERS.keys()))
def test_equals_transformers_class(variant, folder_of, record_property):
    folder = folder_of(variant)
    own = backbone(folder)
    assert type(own).__module__.startswith("millpond.backends.torch.forwards.")
    each = [EACH_LENGTH] if variant in ("modernbert", "nomic", "gte", "albert-groups", "llama") else []
    for lengths in (LENGTHS, (1,), *each):
        worst = difference(states(own, lengths), expected_states(folder, lengths))
        record_property("error", worst)
        assert worst <= TOLERANCE


@pytest.mark.parametrize("variant", marked(VARIANTS, contract=VARIANTS.keys() - DECODERS.keys()))
def test_half_precision_points_the_same_way(variant, folder_of):
    folder = folder_of(variant)
    assert_same_direction(states(backbone(folder, torch.bfloat16)), expected_states(folder))


@pytest.mark.parametrize("variant", marked(NATIVE))
@pytest.mark.parametrize(("highest", "dtype"), TARGETS)
def test_kernels_equal_transformers_class(variant, highest, dtype, folder_of, record_property):
    folder = folder_of(variant)
    own = native_states(plan_of(plain(folder, dtype), highest, dtype))
    if dtype is torch.bfloat16:
        assert_same_direction(own, expected_states(folder))
        return
    worst = apart(own, expected_states(folder))
    record_property("error", worst)
    assert worst <= TOLERANCE


@compiled
@pytest.mark.parametrize("variant", [name for name in TORCH_ONLY if not name.startswith(("albert", "llama-of"))])
def test_what_the_kernels_do_not_compute_runs_in_torchs_operators(variant, folder_of):
    folder = folder_of(variant)
    with pytest.raises(NotSupported):
        plan_of(plain(folder))
    module = backbone(folder, native=True)
    assert type(module).__name__.startswith("Packed")
    assert apart(states(module), expected_states(folder)) <= TOLERANCE


# --- What millpond's forwards hold, how they run in torch's operators, and the modules that they do not replace -------


@pytest.mark.contract
@pytest.mark.parametrize("variant", ["modernbert-biases", "nomic", "gte-without-types", "albert-groups"])
def test_every_product_is_one_that_can_be_replaced(variant, folder_of):
    """oneDNN's layers in bfloat16, int8 layers with ``quantization``; none of torch's linear layers remains."""
    plain, small = (backbone(folder_of(variant), torch.bfloat16, quantization=kind) for kind in (None, "int8"))
    for module, kind in ((plain, ReorderedLinear | PlainLinear), (small, Int8Linear)):
        linears = [layer for layer in module.modules() if "Linear" in type(layer).__name__]
        assert len(linears) >= 5
        assert all(isinstance(layer, kind) for layer in linears)
    expected = expected_states(folder_of(variant))
    cosine = torch.cosine_similarity(states(small).float(), expected, dim=-1)
    assert cosine.mean() >= 0.99


@pytest.mark.contract
@pytest.mark.parametrize("variant", ["albert", "nomic-of-48-columns"])
def test_token_types_are_read(variant, folder_of):
    types = torch.arange(sum(LENGTHS)) % 2
    own, theirs = (backbone(folder_of(variant), packed=packed) for packed in (True, False))
    expected = states(theirs, types=types)
    worst, without = (difference(states(own, **inputs), expected) for inputs in ({"types": types}, {}))
    assert worst <= TOLERANCE
    assert without > VISIBLE


@pytest.mark.contract
def test_albert_counts_a_shared_layer_as_often_as_it_is_passed(folder_of):
    shared, grouped = (backbone(folder_of(variant)) for variant in ("albert", "albert-groups"))
    assert [len(set(own.layers)) for own in (shared, grouped)] == [1, 4]
    assert [len(own.layers) for own in (shared, grouped)] == [3, 10]
    assert _multiplied_weights(shared) == 24 * 48 + 3 * (4 * 48 * 48 + 2 * 48 * 96)


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_blocks_of_rows_change_nothing(name, rows, folder_of, monkeypatch):
    whole = states(backbone(folder_of(name)))
    taken = []
    feed = decoder.PackedLayer._feed

    def counted(self, hidden, mixed):
        taken.append(len(hidden))
        feed(self, hidden, mixed)

    monkeypatch.setattr(decoder.PackedLayer, "_feed", counted)
    monkeypatch.setattr(decoder, "_ROWS", rows)
    assert difference(states(backbone(folder_of(name))), whole) <= TOLERANCE
    assert max(taken) == rows


# --- Models that this forward does not support run in transformers' class. -------------------------------------------


class Adapted(nn.Linear):
    """A linear layer with an addition, as an adapter library creates."""


def adapted(backbone: Any) -> None:
    old = backbone.layers[1].self_attn.v_proj
    new = Adapted(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    backbone.layers[1].self_attn.v_proj = new


def half_biased(backbone: Any) -> None:
    layer = backbone.layers[0].self_attn.k_proj
    layer.bias = nn.Parameter(torch.ones(layer.out_features), requires_grad=False)


def other_activation(backbone: Any) -> None:
    backbone.layers[1].mlp.act_fn = nn.ReLU()


def turned_in_part(backbone: Any) -> None:
    backbone.rotary_emb.inv_freq = backbone.rotary_emb.inv_freq[:-2]


def of_another_kind(backbone: Any) -> None:
    backbone.__class__ = type("LlamaModel", (type(backbone),), {"__module__": "elsewhere"})


def scaled_embeddings(backbone: Any) -> None:
    backbone.embed_tokens.embed_scale = torch.tensor(7.0)


@pytest.mark.parametrize(
    "change", [adapted, half_biased, other_activation, turned_in_part, of_another_kind, scaled_embeddings]
)
def test_an_unsupported_module_is_not_replaced(change, folder_of):
    theirs = backbone(folder_of("llama"), packed=False)
    assert PackedDecoder.fits(theirs, row_of("llama"))
    change(theirs)
    assert packed_forward(theirs, row_of("llama")) is theirs
    assert all(hasattr(layer, "self_attn") for layer in theirs.layers)


# --- Parameters and linear layers, which other modules read. ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_weights_are_counted_and_held_once(dtype, folder_of):
    config = json.loads((folder_of("qwen3") / "config.json").read_text())
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    layer = hidden * config["head_dim"] * (2 * heads + 2 * kv) + 3 * hidden * config["intermediate_size"]
    theirs = backbone(folder_of("qwen3"), dtype=dtype, packed=False)
    ours = packed_forward(theirs, row_of("qwen3"))
    assert _multiplied_weights(ours) == layer * config["num_hidden_layers"]
    assert not any(isinstance(part, nn.Linear) for part in theirs.modules())


# --- The norm alone. -------------------------------------------------------------------------------------------------


@pairwise(
    dtype=[torch.float32, torch.bfloat16, torch.float16], shape=[(1, 48), (300, 96), (7, 5, 16)], centred=[False, True]
)
def test_the_norm(shape, dtype, centred):
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(*shape, generator=generator).to(dtype) * 30
    rows[0, :1] = 0  # for a row of zeros, only eps is under the root
    weight = torch.randn(*shape[1:], generator=generator).to(dtype)
    wide = rows.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + (1 if centred else 0))
    norm = RMSNorm(weight, 1e-6, centred=centred)
    for actual in (norm(rows), norm(torch.stack((rows, rows), 1)[:, 0])):  # and non-contiguous rows
        assert actual.dtype is dtype
        assert actual.shape == rows.shape
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(actual.double(), expected, rtol=2 * step, atol=2 * step)
    other = RMSNorm(weight, 1.0, centred=centred)(rows[-1:] / 30).double()
    assert (other - expected[-1:]).abs().max() > 0.1


# --- The precision that is faster on a processor, and the memory of packed weights ------------------------------------


# --- Which precision the encoder takes on a processor, and which kernels serve it -------------------------------------


built = pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels: no C++ compiler, or no AVX2")
CPU = torch.device("cpu")


@pytest.fixture
def processor(monkeypatch):
    """Pretends a processor: its highest instruction set and its speeds."""

    def pretend(isa, **speeds):
        monkeypatch.setattr(library, "isa", lambda: isa)
        monkeypatch.setattr(library, "kernel_table", lambda: None if isa is None else library.KernelTable())
        monkeypatch.setattr(library, "absent", lambda: "not built")
        monkeypatch.setattr(precision, "operations_per_second", lambda: speeds)

    return pretend


def automatic(stored=None):
    return placement.resolve_dtype("auto", CPU, Architecture, stored)


@pytest.mark.parametrize(
    ("isa", "speeds", "expected", "line"),
    [
        pytest.param(
            "avx512bf16",
            {"float32": 1e11, "bfloat16": 2e11},
            torch.bfloat16,
            "avx512bf16 in bfloat16 (vdpbf16ps does 2.0 x the operations of float32, measured), avx512 in float32",
            id="dot-products-twice-as-fast",
        ),
        pytest.param(
            "avx512bf16",
            {"float32": 2e11, "bfloat16": 1e11},
            torch.float32,
            "avx512 in float32 (vdpbf16ps does 0.5 x the operations of float32, measured: avx512bf16 only where "
            "bfloat16 is asked for)",
            id="dot-products-at-a-quarter",
        ),
        pytest.param(
            "avx512bf16",
            {"float32": 1e11, "bfloat16": 1.1e11},
            torch.float32,
            "avx512 in float32 (vdpbf16ps does 1.1 x",
            id="a-gain-too-small",
        ),
        pytest.param(
            "amx",
            {"float32": 2e11, "bfloat16": 1e11},
            torch.bfloat16,
            "amx in bfloat16 (tiles), avx512 in float32",
            id="tiles",
        ),
        pytest.param(
            "avx512", {"float32": 1e11}, torch.float32, "avx512 in float32 (no dot products of bfloat16)", id="avx512"
        ),
        pytest.param(
            "avx2", {"float32": 1e11}, torch.float32, "avx2 in float32 (no dot products of bfloat16)", id="avx2"
        ),
    ],
)
def test_the_faster_precision_is_taken_and_env_says_why(processor, isa, speeds, expected, line):
    processor(isa, **speeds)
    assert automatic() is expected
    assert placement.resolve_dtype("bfloat16", CPU, Architecture, None) is torch.bfloat16
    assert precision.served_by().startswith(line)


@pytest.mark.parametrize("has", [pytest.param(True, id="with"), pytest.param(False, id="without")])
def test_without_kernels_torch_is_asked(processor, monkeypatch, has):
    processor(None)
    monkeypatch.setattr(placement, "has_native_bfloat16", lambda: has)
    assert automatic() is (torch.bfloat16 if has else torch.float32)
    assert precision.served_by() == "none (not built)"


@built
def test_what_the_processor_has_is_measured_once(monkeypatch):
    table = library.kernel_table()
    calls = []
    for name in ("float32", "bfloat16"):
        if kernel := getattr(table, f"measure_{name}"):
            call = precision.SpeedCall(rounds=100)
            assert kernel(ctypes.addressof(call)) == 0
            assert call.seconds > 0
            assert call.operations > 100 * 12 * 2 * 8 - 1
    precision.operations_per_second.cache_clear()
    measured = precision._fastest
    monkeypatch.setattr(precision, "_fastest", lambda kernels: calls.append(kernels) or measured(kernels))
    speeds = precision.operations_per_second()
    assert precision.operations_per_second() is speeds
    assert len(calls) == 1
    expected = {"float32", "bfloat16"} if library.isa() in ("avx512bf16", "amx") else {"float32"}
    assert set(speeds) == expected
    assert min(speeds.values()) > 1e6


def test_the_shortest_run_counts():
    """Others use the processor for a while: the longer runs say nothing."""
    seconds = {"float32": iter([9.0, 1.0] * 20), "bfloat16": iter([0.5, 7.0] * 20)}

    def kernel(name):
        def measure(address):
            call = precision.SpeedCall.from_address(address)
            call.seconds, call.operations = next(seconds[name]), 10.0

        return measure

    assert precision._fastest({name: kernel(name) for name in seconds}) == {"float32": 10.0, "bfloat16": 20.0}


# --- Memory of packed weights and workspaces: zeroed, on a boundary of 2 MiB, and a process's own ---------------------


@pytest.mark.parametrize("size", [1, 4096, (2 << 20) + 3])
def test_it_is_zeroed_and_aligned(size):
    memory = Memory(size)
    assert memory.size == len(memory.bytes) == size
    assert memory.address % (2 << 20) == 0
    assert not memory.bytes.any()


def test_more_than_there_is_is_a_memory_error():
    with pytest.raises(MemoryError, match="no memory for"):
        Memory(1 << 60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_writes_into_its_own_copy():
    """Else two processes would compute in one workspace."""
    memory = Memory(8192)
    memory.bytes[:] = 3
    context = multiprocessing.get_context("fork")
    seen, done = context.Pipe(duplex=False)

    def write():
        before = memory.bytes.copy()
        memory.bytes[:] = 5
        done.send((int(before.min()), int(before.max()), int(memory.bytes.min())))

    child = context.Process(target=write)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert seen.recv() == (3, 3, 5)
    assert np.array_equal(memory.bytes, np.full(8192, 3, dtype=np.uint8))
