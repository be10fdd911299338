"""Encoders: millpond's forwards compared with transformers' classes on a packed row; and mistakes to detect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import MAX_TOKENS, write_checkpoint
from torch import nn

from millpond.attention.segments import Segments
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.native_config import translate
from millpond.engine.execute.threads import _multiplied_weights
from millpond.models import modernbert, rotary_encoder
from millpond.models.int8 import Int8Linear
from millpond.models.linear import PlainLinear, ReorderedLinear
from millpond.models.load import load_backbone

pytestmark = pytest.mark.contract  # every variant of a layer

TOLERANCE = 1e-5  # relative to the largest value
VISIBLE = 1e-3
# Lengths from one token to the maximum, unordered, some neighbours of equal length.
LENGTHS = (5, *range(MAX_TOKENS, 0, -1), 1, 1, 2, 40, 40, 40)

BIASED = {"norm_bias": True, "attention_bias": True, "mlp_bias": True}
YARN = {"rope_type": "yarn", "rope_theta": 160000.0, "factor": 4.0, "original_max_position_embeddings": 16}
# Variants of a family's checkpoints: name, family and fields of config.json.
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "modernbert": ("modernbert", {}),
    "modernbert-biases": ("modernbert", BIASED),
    "modernbert-relu": ("modernbert", {"hidden_activation": "relu"} | BIASED),
    "modernbert-gelu-new": ("modernbert", {"hidden_activation": "gelu_new"}),
    "modernbert-global": ("modernbert", {"global_attn_every_n_layers": 1}),
    "modernbert-local": ("modernbert", {"global_attn_every_n_layers": 4, "num_hidden_layers": 6}),
    "modernbert-listed": (
        "modernbert",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
    ),
    "modernbert-yarn": (
        "modernbert",
        {
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        },
    ),
    "nomic": ("nomic", {}),
    "nomic-geglu": ("nomic", {"activation_function": "geglu"}),
    "nomic-glu": ("nomic", {"activation_function": "glu"}),
    "gte": ("gte", {}),
    "gte-en": ("gte-en", {}),
    "gte-snowflake": ("gte-snowflake", {"hidden_act": "gelu_new"}),
    "albert": ("albert", {}),
    "albert-gelu": ("albert", {"hidden_act": "gelu"}),
    "albert-groups": ("albert", {"num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2}),
}

TURNED = {"modernbert": modernbert, "nomic": rotary_encoder, "gte": rotary_encoder}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant's checkpoint."""
    root = tmp_path_factory.mktemp("variants")

    def folder(variant: str) -> Path:
        family, config = VARIANTS[variant]
        place = root / variant
        return place if place.exists() else write_checkpoint(place, family, config=config)

    return folder


def backbone(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """The backbone that the engine loads; ``packed=False``: transformers' class."""
    checkpoint = read_checkpoint(folder)
    row = find(checkpoint.config, folder.name)
    checkpoint = replace(checkpoint, config=translate(row, checkpoint.config, folder.name))
    return load_backbone(checkpoint, row, device=torch.device("cpu"), dtype=dtype, **options)


@torch.inference_mode()
def states(module: nn.Module, lengths: tuple[int, ...] = LENGTHS, **changed: Any) -> torch.Tensor:  # [tokens, hidden]
    ids = torch.randint(5, 200, (1, sum(lengths)), generator=torch.Generator().manual_seed(4))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    row = {"input_ids": ids, "position_ids": positions, "segments": Segments.of(lengths)}
    return module(**row | changed).last_hidden_state[0]


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers_class(variant, folder_of, record_property):
    own, theirs = (backbone(folder_of(variant), packed=packed) for packed in (True, False))
    assert type(own).__module__.startswith("millpond.models.")
    assert type(theirs).__module__.startswith("transformers.")
    for lengths in (LENGTHS, (1,)):
        worst = difference(states(own, lengths), states(theirs, lengths))
        record_property("error", worst)
        assert worst <= TOLERANCE


@pytest.mark.parametrize("variant", ["modernbert", "nomic", "gte", "albert"])
def test_half_precision_points_the_same_way(variant, folder_of):
    own = states(backbone(folder_of(variant), torch.bfloat16)).float()
    expected = states(backbone(folder_of(variant), packed=False))
    cosine = torch.cosine_similarity(own, expected, dim=-1)
    assert cosine.mean() >= 0.999
    assert cosine.min() >= 0.99
    assert difference(own, expected) > TOLERANCE  # float32 was not used


@pytest.mark.parametrize("variant", ["modernbert-biases", "nomic", "gte-en", "albert-groups"])
def test_every_product_is_one_that_can_be_replaced(variant, folder_of):
    """oneDNN's layers in bfloat16, int8 layers with ``quantization``; none of torch's linear layers remains."""
    plain, small = (backbone(folder_of(variant), torch.bfloat16, quantization=kind) for kind in (None, "int8"))
    for module, kind in ((plain, ReorderedLinear | PlainLinear), (small, Int8Linear)):
        linears = [layer for layer in module.modules() if "Linear" in type(layer).__name__]
        assert len(linears) >= 5
        assert all(isinstance(layer, kind) for layer in linears)
    expected = states(backbone(folder_of(variant), packed=False))
    cosine = torch.cosine_similarity(states(small).float(), expected, dim=-1)
    assert cosine.mean() >= 0.99


# --- Mistakes: each must change the states. --------------------------------------------------------------------------


def moved(folder: Path, change: Callable[[Any], None]) -> float:
    """The difference from transformers' states after ``change`` was applied to the forward."""
    own = backbone(folder)
    change(own)
    return difference(states(own), states(backbone(folder, packed=False)))


def without_window(own: modernbert.PackedModernBert) -> None:
    for layer in own.layers:
        layer.window = None


def one_more_in_the_window(own: modernbert.PackedModernBert) -> None:
    for layer in own.layers:
        layer.window = layer.window and layer.window + 1


def bases_exchanged(own: modernbert.PackedModernBert) -> None:
    kinds = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    for layer in own.layers:
        layer.kind = kinds[layer.kind]


def halves_exchanged(own: modernbert.PackedModernBert) -> None:
    for layer in own.layers:
        one, other = layer.gate_proj.weight.data, layer.up_proj.weight.data
        layer.gate_proj.weight.data, layer.up_proj.weight.data = other, one


def a_norm_before_the_first_layer(own: modernbert.PackedModernBert) -> None:
    own.layers[0].attention_norm = own.layers[1].attention_norm


def no_norm_at_the_end(own: modernbert.PackedModernBert) -> None:
    own.norm = nn.Identity()


@pytest.mark.parametrize(
    "mistake",
    [
        without_window,
        one_more_in_the_window,
        bases_exchanged,
        halves_exchanged,
        a_norm_before_the_first_layer,
        no_norm_at_the_end,
    ],
)
def test_notices(mistake, folder_of):
    assert moved(folder_of("modernbert"), mistake) > VISIBLE


@pytest.mark.parametrize("variant", ["nomic", "gte"])
def test_notices_the_halves_of_a_gate_swapped(variant, folder_of):
    assert moved(folder_of(variant), halves_exchanged) > VISIBLE


def test_notices_the_groups_of_layers_in_another_order(folder_of):
    def change(own: Any) -> None:
        own.layers = nn.ModuleList(reversed(own.layers))

    assert moved(folder_of("albert-groups"), change) > VISIBLE


@pytest.mark.parametrize("variant", ["albert", "nomic"])
def test_token_types_are_read(variant, folder_of):
    types = torch.arange(sum(LENGTHS))[None] % 2
    own, theirs = (backbone(folder_of(variant), packed=packed) for packed in (True, False))
    expected = states(theirs, token_type_ids=types)
    worst, without = (difference(states(own, **inputs), expected) for inputs in ({"token_type_ids": types}, {}))
    assert worst <= TOLERANCE
    assert without > VISIBLE


def test_albert_counts_a_shared_layer_as_often_as_it_is_passed(folder_of):
    shared, grouped = (backbone(folder_of(variant)) for variant in ("albert", "albert-groups"))
    assert [len(set(own.layers)) for own in (shared, grouped)] == [1, 4]
    assert [len(own.layers) for own in (shared, grouped)] == [3, 10]
    assert _multiplied_weights(shared) == 24 * 48 + 3 * (4 * 48 * 48 + 2 * 48 * 96)


@pytest.mark.parametrize("bias", ["qkv", "attention_out", "gate_proj", "up_proj", "down_proj"])
def test_notices_that_a_bias_is_left_out(bias, folder_of):
    def change(own: Any) -> None:
        for layer in own.layers:
            getattr(layer, bias).bias = None

    assert moved(folder_of("modernbert-biases"), change) > VISIBLE


@pytest.mark.parametrize("variant", TURNED)
def test_notices_rotation_in_the_other_direction(variant, folder_of, monkeypatch):
    module = TURNED[variant]
    right = module.apply_rotary
    monkeypatch.setattr(module, "apply_rotary", lambda rows, cos, sin: right(rows, cos, -sin))
    assert moved(folder_of(variant), lambda own: None) > VISIBLE
