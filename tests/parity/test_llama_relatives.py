"""InternLM2 and the bidirectional Llama, which are Llama with other tensor names; and GPT-2's config."""

from __future__ import annotations

import json

import pytest
import torch
from tests.parity.oracles import oracle
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, _ids, difference, states
from tests.tiny import edit_json, write_checkpoint

from millpond import Engine
from millpond.checkpoints import architectures, native_config
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError
from millpond.models import internlm2, load

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's


def expected_of(folder):
    reference = oracle(folder)
    with torch.inference_mode():
        return [reference(ids).numpy() for ids in _ids(folder, SHORT)]


# --- InternLM2 ------------------------------------------------------------------------------------------------------


def test_notices_a_plain_cut_into_query_key_and_value(plain, monkeypatch):
    """wqkv is grouped by key head; splitting it into three parts gives the right shapes with wrong rows."""

    def cut(weight, *, heads, kv_heads):
        dim = len(weight) // (heads + 2 * kv_heads)
        return weight.split([heads * dim, kv_heads * dim, kv_heads * dim])

    monkeypatch.setattr(internlm2, "split_qkv", cut)
    with Engine(plain("internlm2"), dtype="float32", device="cpu") as engine:
        assert difference(states(engine, SHORT), expected_of(plain("internlm2"))) > VISIBLE


def test_split_by_hand():
    """Four query heads on two key heads, one wide: q0 q1 k0 v0 q2 q3 k1 v1."""
    query, key, value = internlm2.split_qkv(torch.arange(8.0)[:, None], heads=4, kv_heads=2)
    assert (query[:, 0].tolist(), key[:, 0].tolist(), value[:, 0].tolist()) == ([0, 1, 4, 5], [2, 6], [3, 7])


def test_a_file_in_pickled_shards(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "internlm2")
    with Engine(folder, dtype="float32", device="cpu") as engine:
        right = states(engine, SHORT)
    from safetensors.torch import load_file

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
    from tests.tiny import drop_tensor

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


# --- Llama without its mask -----------------------------------------------------------------------------------------


def test_notices_that_the_mask_was_left_on(plain, monkeypatch):
    from millpond.models import llama_bidirectional

    monkeypatch.setattr(llama_bidirectional, "translate", lambda config, name: {**config, "model_type": "llama"})
    with Engine(plain("llama-bidirectional"), dtype="float32", device="cpu") as engine:
        assert difference(states(engine, SHORT), expected_of(plain("llama-bidirectional"))) > VISIBLE


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
    from safetensors.torch import load_file, save_file

    folder = write_checkpoint(tmp_path / "model", family, wrapped=True)
    claimed, heads = CLASSES[family]
    edit_json(folder / "config.json", architectures=[claimed])
    tensors = load_file(folder / "model.safetensors") | {name: torch.ones(3, 48) for name in heads}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = read_checkpoint(folder)
    row = architectures.find(checkpoint.config, "x")
    from dataclasses import replace

    checkpoint = replace(checkpoint, config=native_config.translate(row, checkpoint.config, "x"))
    backbone = load.load_backbone(checkpoint, row, device=torch.device("cpu"), dtype=torch.float32)
    assert sum(parameter.numel() for parameter in backbone.parameters()) > 10_000


def test_gpt2_does_not_check_for_padding(tmp_path):
    """With a padding token, transformers' class copies the ids to the host to warn, which would make a GPU wait."""
    folder = write_checkpoint(tmp_path / "model", "gpt2", config={"pad_token_id": 0})
    checkpoint = read_checkpoint(folder)
    row = architectures.find(checkpoint.config, "x")
    backbone = load.load_backbone(checkpoint, row, device=torch.device("cpu"), dtype=torch.float32)
    assert backbone.config.pad_token_id is None
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert difference(states(engine, SHORT), expected_of(folder)) <= TOLERANCE


def test_gpt2_with_scores_scaled_by_layer(tmp_path):
    fields = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
    folder = write_checkpoint(tmp_path / "model", "gpt2", config=fields)
    plain = write_checkpoint(tmp_path / "plain", "gpt2")
    with Engine(folder, dtype="float32", device="cpu") as engine:
        actual = states(engine, SHORT)
    assert difference(actual, expected_of(folder)) <= TOLERANCE
    assert difference(actual, expected_of(plain)) > VISIBLE
