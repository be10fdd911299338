"""NeoMME's text: the retrieval class's dense vectors, from a checkpoint that holds its other head, too."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.test_backbones import TOLERANCE, VISIBLE, difference, expected_of, ids_of, states
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine

BACKENDS = pytest.mark.parametrize("backend", ["native", "torch"])


@pytest.fixture
def folder(tmp_path):
    """As ``NeoMMEForRetrieval`` is saved."""
    place = write_checkpoint(tmp_path / "model", "neomme")
    tensors = {f"model.{name}": tensor for name, tensor in load_file(place / "model.safetensors").items()}
    tensors["multi_vector_head.proj.weight"] = torch.randn(24, 48)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((place / "config.json").read_text()) | {"architectures": ["NeoMMEForRetrieval"]}
    (place / "config.json").write_text(json.dumps(content))
    return place


@BACKENDS
def test_a_vector_is_the_retrieval_class_s_dense_one(backend, folder):
    from transformers import NeoMMEForRetrieval

    reference = NeoMMEForRetrieval.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        right = [reference(input_ids=ids[None]).dense_embeddings[0].numpy() for ids in ids_of(folder, TEXTS)]
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        assert np.abs(engine.embed(TEXTS, normalize=True).embeddings - np.stack(right)).max() <= TOLERANCE


@BACKENDS
@pytest.mark.parametrize(
    "mistake",
    [
        {},
        {"sliding_window": 4},
        {"residual_multiplier": 1.0},
        {"per_layer_config": {"2": {"sliding_window": 3}, "1": {"sliding_window": None}}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 1.0}}},
    ],
    ids=str,
)
def test_windows_positions_and_multipliers_are_read(mistake, backend, folder):
    right = expected_of(folder, TEXTS)
    with Engine(folder, dtype="float32", device="cpu", backend=backend, hf_overrides=mistake) as engine:
        off = difference(states(engine, TEXTS), right)
    assert off > VISIBLE if mistake else off <= TOLERANCE


@BACKENDS
@pytest.mark.parametrize(
    "config",
    [
        {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.3},
        {"layer_types": None, "num_hidden_layers": 9, "rope_theta": 50.0},
        {
            "per_layer_config": {
                "0": {"sliding_window": 2},
                "1": {"sliding_window": None},
                "3": {"sliding_window": None},
            }
        },
        {"hidden_size": 64, "head_dim": 32, "embedding_rank": 64},
    ],
    ids=str,
)
def test_a_config_is_read_as_transformers_reads_it(config, backend, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "neomme", config=config)
    right = expected_of(folder, TEXTS)
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        assert difference(states(engine, TEXTS), right) <= TOLERANCE


@pytest.mark.parametrize("part", ["lambdas", "alpha", "value_embeddings.weight", "gate_proj.weight"])
def test_each_part_moves_the_states(part, folder):
    right = expected_of(folder, TEXTS)
    tensors = load_file(folder / "model.safetensors")
    plain = {"lambdas": torch.tensor([1.0, 0.0])}
    moved = {
        name: plain.get(part, torch.zeros_like(tensor)).clone() if name.endswith(part) else tensor
        for name, tensor in tensors.items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    with Engine(folder, dtype="float32", device="cpu", backend="native") as engine:
        found = states(engine, TEXTS)
    assert difference(found, expected_of(folder, TEXTS)) <= TOLERANCE
    assert difference(found, right) > VISIBLE
