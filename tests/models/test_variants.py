"""Every variant in the torch backend's forwards beside transformers' classes, what they hold, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backbones import backbone, expected_states, states
from tests.pairwise import pairwise
from tests.variants import (
    DECODERS,
    EACH_LENGTH,
    LENGTHS,
    SLOW,
    TOLERANCE,
    VARIANTS,
    VISIBLE,
    assert_same_direction,
    difference,
    write_variant,
)
from torch import nn

from millpond.backends.torch.forwards import decoder
from millpond.backends.torch.forwards.decoder import PackedDecoder
from millpond.backends.torch.forwards.int8 import Int8Linear
from millpond.backends.torch.forwards.linear import PlainLinear, ReorderedLinear
from millpond.backends.torch.forwards.rms_norm import RMSNorm
from millpond.backends.torch.loading.load import packed_forward
from millpond.backends.torch.threads import _multiplied_weights
from millpond.checkpoints.architectures import row_of


@pytest.fixture(scope="session")
def folder_of(checkpoint_of: Callable[..., Path]) -> Callable[[str], Path]:
    """The folder of a variant's checkpoint."""
    return lambda variant: checkpoint_of(write_variant, variant)


# --- Every variant beside transformers' classes -----------------------------------------------------------------------


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
    own = states(small)
    cosine = (own * expected).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.mean() >= 0.99


@pytest.mark.contract
@pytest.mark.parametrize("variant", ["albert", "nomic-of-48-columns"])
def test_token_types_are_read(variant, folder_of):
    types = (np.arange(sum(LENGTHS)) % 2).astype(np.int32)
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
        return feed(self, hidden, mixed)

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
