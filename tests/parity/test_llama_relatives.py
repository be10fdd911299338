"""InternLM2 and the bidirectional Llama, which are Llama with other tensor names; and GPT-2's config."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, difference, expected_of, states
from tests.tiny import drop_tensor, edit_json, write_checkpoint

from millpond import Engine
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's


# --- InternLM2 ------------------------------------------------------------------------------------------------------


def test_a_file_in_pickled_shards(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "internlm2")
    with Engine(folder, dtype="float32", device="cpu") as engine:
        right = states(engine, SHORT)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    places = {}
    for i, part in enumerate((names[:7], names[7:])):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "model.safetensors").unlink()
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert difference(states(engine, SHORT), right) == 0


def test_biases_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "internlm2")
    edit_json(folder / "config.json", bias=True)
    with pytest.raises(UnsupportedArchitectureError, match="bias true.*InternLM2"):
        Engine(folder, dtype="float32", device="cpu")


def test_a_missing_tensor_is_named(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "internlm2")
    drop_tensor(folder, "layers.1.attention.wo.weight")
    with pytest.raises(WeightMismatchError, match=r"layers\.1\.self_attn\.o_proj"):
        Engine(folder, dtype="float32", device="cpu")


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_dynamic_scaling_is_ignored_below_its_threshold_and_refused_above(key, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "internlm2", tokenizer_limit=None)
    edit_json(folder / "config.json", rope_scaling={key: "dynamic", "factor": 2.0})
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert engine.spec.max_length == 64
    with pytest.raises(ModelLoadError, match="max_length=65 is more than .* choose 1 to 64"):
        Engine(folder, dtype="float32", device="cpu", max_length=65)
    edit_json(folder / "config.json", rope_scaling=None)
    with Engine(folder, dtype="float32", device="cpu", max_length=65) as engine:
        assert engine.spec.max_length == 65


# --- The classes that hub checkpoints name, heads and all -----------------------------------------------------------

CLASSES = {
    "internlm2": ("InternLM2ForRewardModel", ("v_head.weight",)),
    "llama-bidirectional": ("LlamaBidirectionalForSequenceClassification", ("score.weight",)),
    "gpt2": ("GPT2ForSequenceClassification", ("score.weight",)),
    "jamba": ("JambaForSequenceClassification", ("score.weight",)),
    "gemma3": ("Gemma3ForCausalLM", ()),
    "eurobert": ("EuroBertForSequenceClassification", ("dense.weight", "classifier.weight", "classifier.bias")),
    "electra": ("ElectraForPreTraining", ("discriminator_predictions.dense.weight",)),
    "albert": ("AlbertForPreTraining", ("predictions.bias", "sop_classifier.classifier.weight")),
    "deberta-v2": (
        "DebertaV2ForSequenceClassification",
        ("pooler.dense.weight", "classifier.weight", "lm_predictions.lm_head.bias", "mask_predictions.dense.weight"),
    ),
}


@pytest.mark.parametrize("family", CLASSES)
def test_a_backbone_under_a_class_with_a_head(family, tmp_path):
    """The backbone is loaded completely, and the head's tensors are ignored."""
    folder = write_checkpoint(tmp_path / "model", family, wrapped=True)
    claimed, heads = CLASSES[family]
    edit_json(folder / "config.json", architectures=[claimed])
    tensors = load_file(folder / "model.safetensors") | {name: torch.ones(3, 48) for name in heads}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with Engine(folder, dtype="float32", device="cpu", convert="embed") as engine:
        assert np.isfinite(engine.embed(["a"]).embeddings).all()


def test_gpt2_with_scores_scaled_by_layer(tmp_path):
    fields = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
    folder = write_checkpoint(tmp_path / "model", "gpt2", config=fields)
    plain = write_checkpoint(tmp_path / "plain", "gpt2")
    with Engine(folder, dtype="float32", device="cpu") as engine:
        actual = states(engine, SHORT)
    assert difference(actual, expected_of(folder, SHORT)) <= TOLERANCE
    assert difference(actual, expected_of(plain, SHORT)) > VISIBLE
