"""Decoders: millpond's forward compared with transformers' classes on the same packed rows, for each setting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pairwise import pairwise
from tests.tiny import FAMILIES, MAX_TOKENS, write_checkpoint
from torch import nn

from millpond.attention.segments import Segments
from millpond.checkpoints import architectures
from millpond.checkpoints.architectures import row_of
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.engine.execute import threads
from millpond.models import decoder
from millpond.models.decoder import PackedDecoder
from millpond.models.int8 import Int8Linear
from millpond.models.linear import ReorderedLinear
from millpond.models.load import load_backbone, packed_forward
from millpond.models.rms_norm import RMSNorm

TOLERANCE = 1e-5  # relative to the largest value of the states
VISIBLE = 1e-3  # a mistake must change the states by more than this
LENGTHS = (1, 1, 2, 7, 13, 13, 30, MAX_TOKENS, MAX_TOKENS)
CPU = torch.device("cpu")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = ["eurobert", *(name for name, row in FAMILIES.items() if row.head == "ForCausalLM" and name != "jamba")]
# family, and fields of its config.json
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in PLAIN},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 20}),
    "llama-one-key-head": ("llama", {"num_key_value_heads": 1}),
    "llama-as-many-key-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-window-it-does-not-have": ("llama", {"sliding_window": 3}),
    "mistral-wide-heads": ("mistral", {"head_dim": 16}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen3-bidirectional": ("qwen3", {"is_causal": False}),
    "gemma-legacy-activation": ("gemma", {"hidden_act": "gelu"}),
    "gemma2-no-softcap": ("gemma2", {"attn_logit_softcapping": None}),
    "gemma2-biases": ("gemma2", {"attention_bias": True}),
    "eurobert-biases": ("eurobert", {"attention_bias": True, "mlp_bias": True}),
}
# Each has the layers of another case, or is a setting that several families share.
SLOW = ("internlm2", "mistral", "qwen2", "qwen2-sliding", "llama-bidirectional", "mistral-wide-heads", "gemma2-biases")
Loader = Callable[..., nn.Module]


def some_cases() -> list[Any]:
    """The cases as parameters of a test."""
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("decoders")

    def checkpoint(name: str) -> Path:
        family, config = CASES[name]
        folder: Path = root / name
        return folder if folder.exists() else write_checkpoint(folder, family, config=config)

    return checkpoint


@pytest.fixture
def load(checkpoint: Callable[[str], Path]) -> Loader:
    def load(name: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
        description = read_checkpoint(checkpoint(name))
        row = architectures.find(description.config, name)
        return load_backbone(description, row, device=CPU, dtype=dtype, **options)

    return load


@torch.inference_mode()
def states(backbone: nn.Module) -> torch.Tensor:  # [tokens, hidden]
    ids = torch.randint(5, 60, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    out = backbone(input_ids=ids, position_ids=positions, segments=Segments.of(LENGTHS))
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", some_cases())
def test_float32_equals_transformers(name, load):
    ours, theirs = load(name), load(name, packed=False)
    assert isinstance(ours, PackedDecoder)
    assert type(theirs).__module__.startswith("transformers.models.")
    assert difference(states(ours), states(theirs)) <= TOLERANCE


@pytest.mark.parametrize("name", some_cases())
def test_bfloat16_points_where_float32_does(name, load):
    actual, expected = states(load(name, dtype=torch.bfloat16)).float(), states(load(name, packed=False))
    cosine = torch.nn.functional.cosine_similarity(actual, expected, dim=-1)
    assert cosine.mean() >= 0.999
    assert cosine.min() >= 0.99
    assert cosine.min() < 1 - 1e-7  # float32 was not used


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_blocks_of_rows_change_nothing(name, rows, load, monkeypatch):
    whole = states(load(name))
    taken = []
    feed = decoder.PackedLayer._feed

    def counted(self, hidden, mixed):
        taken.append(len(hidden))
        feed(self, hidden, mixed)

    monkeypatch.setattr(decoder.PackedLayer, "_feed", counted)
    monkeypatch.setattr(decoder, "_ROWS", rows)
    assert difference(states(load(name)), whole) <= TOLERANCE
    assert max(taken) == rows


# --- Mistakes: each must change the states, or the tests above could not detect it. ----------------------------------


def assert_noticed(load: Loader, name: str) -> None:
    assert difference(states(load(name)), states(load(name, packed=False))) > VISIBLE


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "eurobert"])
def test_notices_missing_rotary_positions(name, load, monkeypatch):
    monkeypatch.setattr(decoder, "apply_rotary", lambda states, cos, sin: states)
    assert_noticed(load, name)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "eurobert"])
def test_notices_gate_and_up_swapped(name, load):
    ours, theirs = load(name), load(name, packed=False)
    for layer in ours.layers:
        gate, up = layer.gate_proj, layer.up_proj
        gate.weight, up.weight = up.weight, gate.weight
    assert difference(states(ours), states(theirs)) > VISIBLE


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_notices_a_norm_that_is_not_centred(name, load, monkeypatch):
    right = RMSNorm.__init__
    monkeypatch.setattr(RMSNorm, "__init__", lambda self, weight, eps, *, centred: right(self, weight, eps))
    assert_noticed(load, name)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_notices_key_heads_with_the_queries_norm(name, load):
    ours, theirs = load(name), load(name, packed=False)
    for layer in ours.layers:
        layer.qk_norm.weight = layer.qk_norm.weight.flip(0)
    assert difference(states(ours), states(theirs)) > VISIBLE


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("mistral-sliding", "sliding_window", None),
        ("qwen3-bidirectional", "is_causal", True),
        ("gemma", "hidden_act", "silu"),
    ],
)
def test_notices_a_field_of_the_config_unread(name, field, value, load):
    theirs = load(name, packed=False)
    expected = states(theirs)
    setattr(theirs.config, field, value)
    assert difference(states(PackedDecoder(theirs, row_of(theirs.config.model_type))), expected) > VISIBLE


@pytest.mark.parametrize(("name", "field"), [("qwen3-windows", "sliding_window"), ("gemma2", "attn_logit_softcapping")])
def test_notices_a_setting_of_a_layer_unread(name, field, load):
    theirs = load(name, packed=False)
    expected = states(theirs)
    for layer in theirs.layers:
        setattr(layer.self_attn, field, None)
    assert difference(states(PackedDecoder(theirs, row_of(theirs.config.model_type))), expected) > VISIBLE


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
def test_an_unsupported_module_is_not_replaced(change, load):
    theirs = load("llama", packed=False)
    assert PackedDecoder.fits(theirs, row_of("llama"))
    change(theirs)
    assert packed_forward(theirs, row_of("llama")) is theirs
    assert all(hasattr(layer, "self_attn") for layer in theirs.layers)


def test_an_unknown_model_type_is_not_replaced(load):
    theirs = load("llama", packed=False)
    assert packed_forward(theirs, row_of("gpt2")) is theirs


# --- Parameters and linear layers, which other modules read. ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_weights_are_counted_and_held_once(dtype, checkpoint, load):
    config = json.loads((checkpoint("qwen3") / "config.json").read_text())
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    layer = hidden * config["head_dim"] * (2 * heads + 2 * kv) + 3 * hidden * config["intermediate_size"]
    theirs = load("qwen3", dtype=dtype, packed=False)
    ours = packed_forward(theirs, row_of("qwen3"))
    assert threads._multiplied_weights(ours) == layer * config["num_hidden_layers"]
    assert not any(isinstance(part, nn.Linear) for part in theirs.modules())


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3", torch.float32), ("gemma2", torch.bfloat16), ("llama-biases", torch.bfloat16)]
)
def test_every_linear_can_be_in_eight_bits(name, dtype, load):
    small = load(name, dtype=dtype, quantization="int8")
    kinds = [type(part) for part in small.modules() if isinstance(part, Int8Linear | ReorderedLinear | nn.Linear)]
    assert set(kinds) == {Int8Linear}
    assert len(kinds) == 5 * len(small.layers)
    cosine = torch.nn.functional.cosine_similarity(states(small).float(), states(load(name, packed=False)), dim=-1)
    assert 0.98 <= cosine.mean() < 1 - 1e-6


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
