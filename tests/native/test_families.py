"""Native plans from tensors: every family against transformers' classes, names of tensors, and what has no plan."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.backbones import backbone, expected_states
from tests.backbones import states as states_in_torch
from tests.native.models import TARGETS, compiled
from tests.tiny import FAMILIES, write_checkpoint
from tests.tiny.families import some
from tests.tiny.layouts import save_weights
from tests.variants import (
    LENGTHS,
    SLOW,
    TOLERANCE,
    VARIANTS,
    VISIBLE,
    apart,
    assert_same_direction,
    described,
    difference,
    native_states,
)
from tests.variants import WITHOUT_PLAN as VARIANTS_WITHOUT_PLAN
from tests.variants import native as native_of

from millpond import Engine
from millpond.backends.native.encoder import NativeEncoder
from millpond.backends.native.families import build_encoder, missing_plan
from millpond.backends.native.kernels import kernels_of
from millpond.backends.native.packing import weight_packer
from millpond.backends.native.packing.weight_packer import NotSupported
from millpond.backends.native.plans.post_norm import relative_bias
from millpond.backends.native.plans.rotation import frequencies
from millpond.backends.native.structs import ACTIVATIONS
from millpond.backends.torch.forwards.encoder import RelativeBias
from millpond.errors import ModelLoadError, WeightMismatchError

pytestmark = [pytest.mark.contract, compiled]

SHORT = tuple(min(length, 60) for length in LENGTHS)  # texts that the tiny families have positions for
WITHOUT_PLAN = {"gpt2", "jamba", "qwen3.5"}


def native(folder: Path, **options: Any) -> NativeEncoder:
    checkpoint, row = described(folder)
    return build_encoder(checkpoint, row, **{"dtype": "float32", **options})


def states(folder: Path, lengths: tuple[int, ...], **options: Any) -> np.ndarray:
    """The native encoder's states ``[tokens, hidden]``."""
    checkpoint, row = described(folder)
    offset = row.position_offset(checkpoint.config)
    return native_states(native(folder, **options), lengths, offset=offset)


def expected(folder: Path, lengths: tuple[int, ...]) -> np.ndarray:
    """Those of transformers' class; where it has none or cannot run packed rows, those of the torch backend."""
    checkpoint, row = described(folder)
    offset = row.position_offset(checkpoint.config)
    packed = row.prefix == "MPNet" or hasattr(row.forward_class(), "read")
    return states_in_torch(backbone(folder, packed=packed), lengths, offset=offset)


@pytest.mark.parametrize("family", some(name for name in FAMILIES if name not in WITHOUT_PLAN))
def test_a_family_equals_transformers_at_any_width(family, tmp_path):
    """48 columns, heads of 12, embeddings of 24: the kernels compute more columns, which are 0."""
    folder = write_checkpoint(tmp_path / family, family)
    found = states(folder, SHORT)
    assert difference(found, expected(folder, SHORT)) < TOLERANCE
    assert difference(states(folder, SHORT, dtype="bfloat16"), found) > VISIBLE or kernels_of("bfloat16") is None


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


@pytest.mark.parametrize("variant", marked(name for name in VARIANTS if name not in VARIANTS_WITHOUT_PLAN))
@pytest.mark.parametrize(("highest", "dtype"), TARGETS)
def test_a_variant_equals_transformers(variant, highest, dtype, folder_of, record_property):
    folder = folder_of(variant)
    own = native_states(native_of(folder, highest, dtype))
    if dtype == "bfloat16":
        assert_same_direction(own, expected_states(folder))
        return
    worst = apart(own, expected_states(folder))
    record_property("error", worst)
    assert worst <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("gpt2", {}, "GPT2 has no native plan"),
        ("jamba", {}, "Jamba has no native plan"),
        ("modernbert", {"hidden_activation": "mish"}, "activation mish"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "rotary positions of 6 of the 12 columns of a head",
        ),
    ],
)
def test_what_has_no_plan_says_why_by_its_config_alone(family, config, reason, tmp_path):
    checkpoint, row = described(write_checkpoint(tmp_path / family, family))
    whole = {**checkpoint.config, **config}
    found = missing_plan(whole, row)
    assert found is not None and reason in found
    with pytest.raises(NotSupported, match=re.escape(reason)):
        build_encoder(replace(checkpoint, config=whole), row, dtype="float32")


@pytest.mark.parametrize("scaling", [{"rope_type": "llama3", "factor": 4.0}, {"rope_type": "linear"}])
def test_what_a_rotary_type_needs_is_named(scaling, tmp_path):
    checkpoint, row = described(write_checkpoint(tmp_path / "llama", "llama"))
    missing = "low_freq_factor" if "factor" in scaling else "factor"
    with pytest.raises(ModelLoadError, match=f"no {missing} for rotary positions of type"):
        missing_plan({**checkpoint.config, "rope_scaling": scaling}, row)


# --- Names of tensors -------------------------------------------------------------------------------------------------


def renamed(folder: Path, *rules: tuple[str, str]) -> Path:
    """The checkpoint with other names of tensors."""
    tensors = load_file(folder / "model.safetensors")
    for pattern, replacement in rules:
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    save_weights(tensors, folder)
    return folder


@pytest.mark.parametrize(
    ("family", "rules"),
    [
        ("bert", [(r"LayerNorm\.weight", "LayerNorm.gamma"), (r"LayerNorm\.bias", "LayerNorm.beta")]),
        ("bert", [("^", "bert.")]),
        ("bert", [("^", "_orig_mod.bert.")]),
        ("bert", [("^", "0.auto_model.")]),
        ("roberta", [("^", "roberta.")]),
        ("distilbert", [("^", "distilbert.")]),
        ("mpnet", [("^", "module.mpnet.")]),
        ("albert", [("^", "albert.")]),
        ("modernbert", [("^", "model.")]),
        ("qwen3", [("^", "model.")]),
        ("nomic", [("^", "bert.")]),
        ("gte", [("^", "new.")]),
        ("jina", [("^", "_orig_mod.")]),
    ],
)
def test_old_names_and_prefixes_are_read(family, rules, tmp_path):
    folder = write_checkpoint(tmp_path / family, family)
    before = states(folder, SHORT)
    np.testing.assert_array_equal(states(renamed(folder, *rules), SHORT), before)


CHANGES: Mapping[str, tuple[Any, str]] = {
    "missing": (lambda tensors: tensors.pop("encoder.layer.1.output.dense.bias"), "misses encoder.layer.1.output"),
    "two missing": (
        lambda tensors: [tensors.pop(f"embeddings.LayerNorm.{kind}") for kind in ("weight", "bias")],
        "misses embeddings.LayerNorm.bias and 1 more tensors",
    ),
    "unknown": (
        lambda tensors: tensors.update({"encoder.layer.7.output.dense.bias": torch.zeros(3)}),
        "does not know encoder.layer.7.output.dense.bias",
    ),
    "shape": (
        lambda tensors: tensors.update({"encoder.layer.0.output.dense.bias": torch.zeros(47)}),
        "has a wrong shape for encoder.layer.0.output.dense.bias",
    ),
    "twice": (
        lambda tensors: tensors.update({"bert.embeddings.LayerNorm.bias": torch.zeros(48)}),
        "does not know bert.embeddings.LayerNorm.bias",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_disagree_with_the_config_are_named(change, tmp_path):
    folder = write_checkpoint(tmp_path / "bert")
    tensors = load_file(folder / "model.safetensors")
    alter, message = CHANGES[change]
    alter(tensors)
    save_weights(tensors, folder)
    with pytest.raises(WeightMismatchError, match=f"config.json and weights disagree; the model {message}"):
        native(folder)


def test_xlm_roberta_is_read_under_the_names_of_the_flash_implementation(tmp_path):
    """With a table of positions: jina-reranker-v2. The same names with rotary ones are jina-embeddings-v3's."""
    folder = write_checkpoint(tmp_path / "model", "xlm-roberta", head="SequenceClassification")
    before = states(folder, SHORT)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "attention.self.query." in name]:
        parts = [tensors.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        tensors[name.replace("attention.self.query", "mixer.Wqkv")] = torch.cat(parts)
    save_weights(tensors, folder)
    rules = (
        ("encoder.layer", "encoder.layers"),
        ("attention.output.LayerNorm", "norm1"),
        ("attention.output.dense", "mixer.out_proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
        ("output.LayerNorm", "norm2"),
        ("embeddings.LayerNorm", "emb_ln"),
    )
    renamed(folder, *((re.escape(f".{old}."), f".{new}.") for old, new in rules))
    np.testing.assert_array_equal(states(folder, SHORT), before)
    assert difference(before, expected(folder, SHORT)) < TOLERANCE  # in torch too


@pytest.mark.parametrize("buckets", [126, 128, 256])
def test_deberta_with_a_bucket_for_every_distance(buckets, tmp_path):
    """The buckets of the hub's checkpoints and few positions: the formula of far distances would divide by 0."""
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", config={"position_buckets": buckets})
    assert difference(states(folder, (*SHORT, 64)), expected(folder, (*SHORT, 64))) < TOLERANCE
    with pytest.raises(ModelLoadError, match=r"max_length=65 is more than the positions of .* cover \(64\)"):
        Engine(folder, max_length=65, device="cpu")


def test_a_table_of_positions_that_deberta_does_not_read_is_left_alone(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "deberta-v2")
    before = states(folder, SHORT)
    tensors = load_file(folder / "model.safetensors")
    save_weights(tensors | {"embeddings.position_embeddings.weight": torch.ones(512, 48)}, folder)
    np.testing.assert_array_equal(states(folder, SHORT), before)


def test_heads_of_other_tasks_are_left_alone(tmp_path):
    """The language model's file has the same numbers for its backbone, which it draws first."""
    whole, plain = write_checkpoint(tmp_path / "bert", wrapped=True), write_checkpoint(tmp_path / "plain")
    more = load_file(whole / "model.safetensors").keys() - {f"bert.{n}" for n in load_file(plain / "model.safetensors")}
    assert "cls.predictions.transform.dense.weight" in more
    np.testing.assert_array_equal(states(whole, SHORT), states(plain, SHORT))


@pytest.mark.parametrize(("field", "value"), [("num_attention_heads", 5), ("num_attention_heads", 0)])
def test_heads_that_do_not_share_the_columns_are_refused(field, value, tmp_path):
    folder = write_checkpoint(tmp_path / "bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ModelLoadError, match=field):
        native(folder)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name])
def test_activations_are_those_of_transformers(name, tmp_path):
    folder = write_checkpoint(tmp_path / "model", config={"hidden_act": name})
    assert difference(states(folder, SHORT), expected(folder, SHORT)) < TOLERANCE


# --- Weights ----------------------------------------------------------------------------------------------------------


def stored_as(folder: Path, dtype: torch.dtype) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_weights({name: part.to(dtype) if part.is_floating_point() else part for name, part in tensors.items()}, folder)
    return folder


@pytest.mark.parametrize("int8", ["none", "all"])
@pytest.mark.parametrize("family", ["bert", "qwen3", "jina", "modernbert", "deberta-v2", "internlm2"])
def test_weights_are_packed_in_slices(family, int8, tmp_path, monkeypatch):
    if family == "jina" and int8 != "none":
        pytest.skip("no adapters of weights in eight bits")
    folder = stored_as(write_checkpoint(tmp_path / family, family), torch.float16)
    whole = states(folder, SHORT, int8=int8)
    monkeypatch.setattr(weight_packer, "_SLICE", 1)  # 32 rows
    np.testing.assert_array_equal(states(folder, SHORT, int8=int8), whole)


def test_no_table_is_converted_as_a_whole(tmp_path, monkeypatch):
    """What the kernels do not read, half precision, would be in memory in float32 beside the packed table."""
    words = 40_000
    folder = stored_as(write_checkpoint(tmp_path / "model", config={"vocab_size": words}), torch.float16)
    monkeypatch.setattr(weight_packer, "_SLICE", 1 << 16)
    native(folder)
    tracemalloc.start()
    encoder = native(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert encoder.plan.vocabulary == words and peak < words * 48 * 4 / 3


# --- Positions --------------------------------------------------------------------------------------------------------

SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED},
    "yarn": {"rope_type": "yarn", **SCALED},
    "yarn-untruncated": {"rope_type": "yarn", "truncate": False, "beta_fast": 16, "beta_slow": 2, **SCALED},
    "yarn-scales": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.3, **SCALED},
    "yarn-factor": {"rope_type": "yarn", "attention_factor": 1.5, **SCALED},
}


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("dim", [32, 80, 128])
@pytest.mark.parametrize("rope", ROPES)
def test_angles_are_those_of_transformers(rope, dim, theta, part):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    whole = {"rope_type": "default", "rope_theta": theta, **ROPES[rope], "partial_rotary_factor": part}
    config = LlamaConfig(head_dim=dim, max_position_embeddings=512, rope_parameters=dict(whole))
    module = LlamaRotaryEmbedding(config)
    angles, scale = frequencies(whole, dim, most=512)
    np.testing.assert_allclose(angles, module.inv_freq.numpy(), rtol=5e-7)
    assert scale == pytest.approx(module.attention_scaling, rel=1e-6)


def test_buckets_of_distances_are_those_of_mpnet():
    """Of all distances: a bucket of another bound would be another row."""
    table = np.arange(32, dtype=np.float32)[:, None]
    found = relative_bias(table, 514)[0]
    np.testing.assert_array_equal(
        found, RelativeBias(torch.from_numpy(table)).by_distance(torch.arange(-513, 514))[:, 0]
    )
