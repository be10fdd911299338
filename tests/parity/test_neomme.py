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


def test_a_vector_is_the_retrieval_class_s_dense_one(folder):
    from transformers import NeoMMEForRetrieval

    reference = NeoMMEForRetrieval.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        right = [reference(input_ids=ids[None]).dense_embeddings[0].numpy() for ids in ids_of(folder, TEXTS)]
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert np.abs(engine.embed(TEXTS, normalize=True).embeddings - np.stack(right)).max() <= TOLERANCE


@pytest.mark.parametrize("mistake", [{}, {"sliding_window": 4}, {"residual_multiplier": 1.0}], ids=str)
def test_windows_and_multipliers_are_read(mistake, folder):
    right = expected_of(folder, TEXTS)
    with Engine(folder, dtype="float32", device="cpu", hf_overrides=mistake) as engine:
        off = difference(states(engine, TEXTS), right)
    assert off > VISIBLE if mistake else off <= TOLERANCE
