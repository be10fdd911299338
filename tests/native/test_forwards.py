"""Every variant in torch's operators and in each instruction set, compared with transformers' classes; and mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.native.forwards import (
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
from torch import nn

from millpond.checkpoints.architectures import row_of
from millpond.models import decoder, modernbert, rotary_encoder
from millpond.models.decoder import PackedDecoder
from millpond.models.native.weight_packer import NotSupported
from millpond.models.rms_norm import RMSNorm
from millpond.native.library import isa


def marked(names: Any, contract: Any = ()) -> list[Any]:
    marks = [
        (name, pytest.mark.slow if name in SLOW else pytest.mark.contract if name in contract else ()) for name in names
    ]
    return [pytest.param(name, marks=mark) for name, mark in marks]


@pytest.mark.parametrize("variant", marked(VARIANTS, contract=VARIANTS.keys() - DECODERS.keys()))
def test_equals_transformers_class(variant, folder_of, record_property):
    folder = folder_of(variant)
    own = backbone(folder)
    assert type(own).__module__.startswith("millpond.models.")
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


# --- Mistakes: each must change the states. --------------------------------------------------------------------------


def assert_noticed(variant: str, folder_of: Any, change: Any = None) -> Any:
    folder = folder_of(variant)
    own = backbone(folder)
    if change is not None:
        change(own)
    assert difference(states(own), expected_states(folder)) > VISIBLE
    return own


def without_window(own: Any) -> None:
    for layer in own.layers:
        layer.window = None


def one_more_in_the_window(own: Any) -> None:
    for layer in own.layers:
        layer.window = layer.window and layer.window + 1


def bases_exchanged(own: Any) -> None:
    kinds = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    for layer in own.layers:
        layer.kind = kinds[layer.kind]


def halves_exchanged(own: Any) -> None:
    for layer in own.layers:
        layer.gate_proj.weight.data, layer.up_proj.weight.data = layer.up_proj.weight.data, layer.gate_proj.weight.data


def a_norm_before_the_first_layer(own: Any) -> None:
    own.layers[0].attention_norm = own.layers[1].attention_norm


def no_norm_at_the_end(own: Any) -> None:
    own.norm = nn.Identity()


MISTAKES = [
    without_window,
    one_more_in_the_window,
    bases_exchanged,
    halves_exchanged,
    a_norm_before_the_first_layer,
    no_norm_at_the_end,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_notices(mistake, folder_of):
    own = assert_noticed("modernbert", folder_of, mistake)
    if isa() is not None:
        assert apart(native_states(plan_of(own)), expected_states(folder_of("modernbert"))) > VISIBLE


@pytest.mark.parametrize("variant", ["nomic", "gte", "llama", "qwen3", "gemma3", "eurobert"])
def test_notices_the_halves_of_a_gate_swapped(variant, folder_of):
    assert_noticed(variant, folder_of, halves_exchanged)


@pytest.mark.contract
def test_notices_the_groups_of_layers_in_another_order(folder_of):
    def change(own: Any) -> None:
        own.layers = nn.ModuleList(reversed(own.layers))

    assert_noticed("albert-groups", folder_of, change)


@pytest.mark.contract
@pytest.mark.parametrize("bias", ["qkv", "attention_out", "gate_proj", "up_proj", "down_proj"])
def test_notices_that_a_bias_is_left_out(bias, folder_of):
    def change(own: Any) -> None:
        for layer in own.layers:
            getattr(layer, bias).bias = None

    assert_noticed("modernbert-biases", folder_of, change)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("variant", "module"), [("modernbert", modernbert), ("nomic", rotary_encoder), ("gte", rotary_encoder)]
)
def test_notices_rotation_in_the_other_direction(variant, module, folder_of, monkeypatch):
    right = module.apply_rotary
    monkeypatch.setattr(module, "apply_rotary", lambda rows, cos, sin: right(rows, cos, -sin))
    assert_noticed(variant, folder_of)


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma3", "eurobert"])
def test_notices_missing_rotary_positions(variant, folder_of, monkeypatch):
    monkeypatch.setattr(decoder, "apply_rotary", lambda states, cos, sin: states)
    assert_noticed(variant, folder_of)


@pytest.mark.parametrize("variant", ["gemma", "gemma2", "gemma3"])
def test_notices_a_norm_that_is_not_centred(variant, folder_of, monkeypatch):
    right = RMSNorm.__init__
    monkeypatch.setattr(RMSNorm, "__init__", lambda self, weight, eps, *, centred: right(self, weight, eps))
    assert_noticed(variant, folder_of)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
def test_notices_key_heads_with_the_queries_norm(variant, folder_of):
    def change(own: Any) -> None:
        for layer in own.layers:
            layer.qk_norm.weight = layer.qk_norm.weight.flip(0)

    assert_noticed(variant, folder_of, change)


@pytest.mark.parametrize(
    ("variant", "field", "value"),
    [
        ("mistral-window", "sliding_window", None),
        ("qwen3-bidirectional", "is_causal", True),
        ("gemma", "hidden_act", "silu"),
    ],
)
def test_notices_a_field_of_the_config_unread(variant, field, value, folder_of):
    theirs = backbone(folder_of(variant), packed=False)
    setattr(theirs.config, field, value)
    own = PackedDecoder(theirs, row_of(theirs.config.model_type))
    assert difference(states(own), expected_states(folder_of(variant))) > VISIBLE


@pytest.mark.parametrize(
    ("variant", "field"), [("qwen3-windows", "sliding_window"), ("gemma2", "attn_logit_softcapping")]
)
def test_notices_a_setting_of_a_layer_unread(variant, field, folder_of):
    theirs = backbone(folder_of(variant), packed=False)
    for layer in theirs.layers:
        setattr(layer.self_attn, field, None)
    own = PackedDecoder(theirs, row_of(theirs.config.model_type))
    assert difference(states(own), expected_states(folder_of(variant))) > VISIBLE
