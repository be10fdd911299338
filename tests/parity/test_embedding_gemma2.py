"""EmbeddingGemma 2's text, from a checkpoint of the whole model: each part of its own with a mistake that shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, difference, expected_of, states
from tests.tiny import FAMILIES, TEXTS, Layout, Normalize, Pooling, edit_json, write_checkpoint
from tests.tiny.layouts import Dense

from millpond import Engine
from millpond.errors import ModelLoadError, UnsupportedArchitectureError

BACKENDS = pytest.mark.parametrize("backend", ["native", "torch"])
TEXT = FAMILIES["embedding-gemma2"].config["text_config"]


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", **options)


def folder_of(place: Path, **text: Any) -> Path:
    return write_checkpoint(place, "embedding-gemma2", config={"text_config": {**TEXT, **text}})


@BACKENDS
@pytest.mark.parametrize(
    "text",
    [
        {},
        {"embedding_dim": 64},  # more than the layers have
        {"attention_bias": True, "hidden_activation": "silu"},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "per_layer_config": None},
        {"layer_types": None, "num_hidden_layers": 7, "per_layer_config": None, "sliding_window_pattern": 2},
    ],
    ids=str,
)
def test_the_states_are_those_of_transformers_class(text, backend, tmp_path):
    config = {key: value for key, value in {**TEXT, **text}.items() if value is not None}
    if "per_layer_config" not in config:
        config |= {"global_head_dim": 20, "num_global_key_value_heads": 1}
    folder = write_checkpoint(tmp_path / "model", "embedding-gemma2", config={"text_config": config})
    with engine(folder, backend=backend) as loaded:
        assert loaded.spec.dimensions == config["embedding_dim"]
        assert difference(states(loaded, TEXTS), expected_of(folder, TEXTS)) <= TOLERANCE


@BACKENDS
@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("layer_scalar", lambda numbers: np.ones_like(numbers)),  # a factor that is left out
        ("per_layer_projection_norm.weight", lambda numbers: np.ones_like(numbers)),
        (
            "per_layer_model_projection.weight",
            lambda numbers: numbers[::-1].copy(),
        ),  # the layers' parts in another order
        ("embedding_projection.weight", lambda numbers: np.eye(*numbers.shape, dtype=np.float32)),
    ],
    ids=["layer_scalar", "norm", "projection", "embedding"],
)
def test_each_part_moves_the_states(part, changed, backend, tmp_path):
    folder = folder_of(tmp_path / "model")
    right = expected_of(folder, SHORT)
    tensors = load_file(folder / "model.safetensors")
    moved = {name: changed(tensor) if name.endswith(part) else tensor for name, tensor in tensors.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    with engine(folder, backend=backend) as loaded:
        found = states(loaded, SHORT)
    assert difference(found, expected_of(folder, SHORT)) <= TOLERANCE
    assert difference(found, right) > VISIBLE


@BACKENDS
@pytest.mark.parametrize("mistake", [{"sliding_window": 4}, {"rms_norm_eps": 0.1}], ids=str)
def test_the_window_is_a_radius_and_the_epsilon_counts(mistake, backend, tmp_path):
    folder = folder_of(tmp_path / "model")
    right = expected_of(folder, TEXTS)
    with engine(folder, backend=backend, hf_overrides={"text_config": mistake}) as loaded:
        assert difference(states(loaded, TEXTS), right) > VISIBLE


@BACKENDS
def test_its_modules_follow(backend, tmp_path):
    modules = (Pooling(modes=("mean",)), Dense(out_features=40), Normalize())
    layout = Layout(modules=modules, style="old")
    folder = write_checkpoint(tmp_path / "model", "embedding-gemma2", sentence_transformers=layout)
    (module,) = folder.glob("*Dense")
    weights = load_file(module / "model.safetensors")
    pooled = np.stack([rows.mean(0) for rows in expected_of(folder, SHORT)])
    projected = np.tanh(pooled @ weights["linear.weight"].T + weights["linear.bias"])  # Dense's default activation
    right = projected / np.linalg.norm(projected, axis=1, keepdims=True)
    with engine(folder, backend=backend) as loaded:
        assert np.abs(loaded.embed(SHORT).embeddings - right).max() <= TOLERANCE


def test_the_text_alone_as_transformers_saves_it(tmp_path):
    folder = folder_of(tmp_path / "model")
    right = expected_of(folder, SHORT)
    tensors = load_file(folder / "model.safetensors")
    text = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items() if "vision" not in name}
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["EmbeddingGemma2TextModel"]}))
    with engine(folder, backend="native") as loaded:
        assert difference(states(loaded, SHORT), right) <= TOLERANCE


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ({"per_layer_config": {"2": {"sliding_window": 3}}}, UnsupportedArchitectureError, "has sliding_window"),
        ({"per_layer_config": {"full_attention": {}}}, UnsupportedArchitectureError, "has full_attention"),
        ({"per_layer_config": {"2": {"head_dim": 0}}}, ModelLoadError, "head_dim of a layer is 0"),
    ],
)
def test_a_config_that_cannot_be_read(text, error, said, tmp_path):
    folder = folder_of(tmp_path / "model")
    edit_json(folder / "config.json", text_config={**TEXT, **text})
    with pytest.raises(error, match=said):
        engine(folder)
