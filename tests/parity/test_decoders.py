"""Decoders that differ from Llama in one thing or another: each of these things must be right to pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, difference, expected_of, states
from tests.tiny import FAMILIES, TEXTS, edit_json, write_checkpoint
from tests.tiny.heads import write_language_model

from millpond import Engine

pytestmark = pytest.mark.contract

DECODERS = ("phi3", "phi4-mini", "olmo2", "granite", "smollm3", "ministral3", "gpt-neox")
# What a reader may overlook, as fields of config.json that say otherwise.
_PHI4_ROPE = FAMILIES["phi4-mini"].config["rope_scaling"]
_MINISTRAL_ROPE = FAMILIES["ministral3"].config["rope_parameters"]
OVERLOOKED: list[tuple[str, dict[str, Any]]] = [
    ("phi3", {"sliding_window": None}),
    ("phi4-mini", {"rope_scaling": {**_PHI4_ROPE, "short_factor": _PHI4_ROPE["long_factor"]}}),
    ("phi4-mini", {"rope_scaling": None}),
    ("phi4-mini", {"max_position_embeddings": 64}),  # which the scale of the angles' sines follows from
    ("granite", {"attention_multiplier": 12**-0.5}),
    ("granite", {"embedding_multiplier": 1.0}),
    ("granite", {"residual_multiplier": 1.0}),
    ("smollm3", {"no_rope_layers": [1, 1]}),
    ("smollm3", {"no_rope_layers": [0, 1]}),
    ("smollm3", {"sliding_window": 4, "use_sliding_window": True, "layer_types": None}),
    ("ministral3", {"rope_parameters": {**_MINISTRAL_ROPE, "factor": 1.0}}),
    ("ministral3", {"sliding_window": 4}),
    ("gpt-neox", {"rotary_pct": 1.0}),
    ("gpt-neox", {"rotary_emb_base": 100}),
    ("gpt-neox", {"use_parallel_residual": False}),
]


def loaded_states(folder: Path, texts: tuple[str, ...] = SHORT, **options: Any) -> list[np.ndarray]:
    with Engine(folder, dtype="float32", device="cpu", **options) as engine:
        return states(engine, texts)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_equals_transformers(family, backend, tmp_path):
    folder = write_checkpoint(tmp_path / family, family, seed=2)
    assert difference(loaded_states(folder, TEXTS, backend=backend), expected_of(folder, TEXTS)) <= TOLERANCE


@pytest.mark.parametrize(("family", "fields"), OVERLOOKED)
def test_what_config_json_says_counts(family, fields, tmp_path):
    """The other setting is right too, and differs, so that the test above would see it."""
    folder = write_checkpoint(tmp_path / "model", family)
    before = loaded_states(folder)
    edit_json(folder / "config.json", **fields)
    after = loaded_states(folder)
    assert difference(after, expected_of(folder, SHORT)) <= TOLERANCE
    assert difference(after, before) > VISIBLE


def test_olmos_norms_are_of_all_heads(tmp_path):
    """With norms of each head by itself, as Qwen3 has, other states would come out."""
    folder = write_checkpoint(tmp_path / "model", "olmo2")
    heads = np.concatenate([np.float32(0.1) * np.ones(12), np.ones(36)])  # what one head says counts less
    tensors = load_file(folder / "model.safetensors")
    before = loaded_states(folder)
    scaled = {
        name: tensor * heads[: len(tensor), None].astype(np.float32) if name.endswith("q_proj.weight") else tensor
        for name, tensor in tensors.items()
    }
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    after = loaded_states(folder)
    assert difference(after, expected_of(folder, SHORT)) <= TOLERANCE
    assert difference(after, before) > VISIBLE  # a norm of each head would undo the factor


@pytest.mark.parametrize("family", ["phi4-mini", "ministral3"])
def test_texts_end_where_positions_change(family, tmp_path):
    """Beyond the length of the first training positions count otherwise, in Phi-4 those of the whole text."""
    folder = write_checkpoint(tmp_path / "model", family, tokenizer_limit=None)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert engine.spec.max_length == 64


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_granite_reranker_divides_its_logits(backend, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = ["<no>", "<yes>"]
    folder = write_language_model(tmp_path / "model", "granite", tokens)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with Engine(
        folder, dtype="float32", backend=backend, device="cpu", hf_overrides={"classifier_from_token": tokens}
    ) as engine:
        found = engine.classify(SHORT, activation="identity").probs[:, 0]
        ids = engine.tokenize(SHORT)
    no, yes = tokenizer.convert_tokens_to_ids(tokens)
    with torch.inference_mode():
        rows = [reference(torch.tensor([row])).logits[0, -1] for row in ids]
    expected = np.array([float(row[yes] - row[no]) for row in rows])
    assert np.abs(found - expected).max() <= TOLERANCE
    scaling = FAMILIES["granite"].config["logits_scaling"]
    assert np.abs(found - scaling * expected).max() > VISIBLE


def test_the_hubs_layout_of_experts(tmp_path):
    """Each expert has tensors of its own in the file."""
    folder = write_checkpoint(tmp_path / "model", "qwen3-moe")
    assert "layers.0.mlp.experts.3.gate_proj.weight" in load_file(folder / "model.safetensors")
    assert difference(loaded_states(folder), expected_of(folder, SHORT)) <= TOLERANCE
