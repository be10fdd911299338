"""UltraBERT: windows and rotary bases by kind of layer, from the older spelling of its checkpoints and from today's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.parity.test_backbones import TOLERANCE, VISIBLE, Matrices, difference, expected_of, states
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine
from millpond.errors import ModelLoadError, UnsupportedArchitectureError

BACKENDS = ("native", "torch")
OLDER = {"attention_windows": None, "rope_theta": None}  # the fields that today's checkpoints do not have
TODAY = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "default", "rope_theta": 9000.0},
    },
}


def found(folder: Path, backend: Any, **overrides: Any) -> Matrices:
    with Engine(folder, backend=backend, dtype="float32", device="cpu", hf_overrides=overrides) as engine:
        return states(engine, TEXTS)


def write(folder: Path, config: dict[str, Any]) -> Path:
    biases = {key: value for key, value in config.items() if key.endswith("bias")}  # which tensors depend on
    write_checkpoint(folder, "ultrabert", config=biases)
    path = folder / "config.json"
    content = {key: value for key, value in (json.loads(path.read_text()) | config).items() if value is not None}
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [{}, OLDER, OLDER | TODAY, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_every_spelling_equals_transformers(config, backend, tmp_path):
    folder = write(tmp_path / "model", config)
    assert difference(found(folder, backend), expected_of(folder, TEXTS)) <= TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "mistake",
    [
        {"attention_windows": [4, 4, 0]},  # a window that counts the own position
        {"rope_theta": [1000.0, 1000.0, 1000.0]},
        {"is_causal": True},
    ],
    ids=str,
)
def test_a_mistake_is_seen(mistake, backend, tmp_path):
    folder = write(tmp_path / "model", {})
    right = expected_of(folder, TEXTS)
    assert difference(found(folder, backend, **mistake), right) > VISIBLE


def test_layers_of_a_kind_that_differ(tmp_path):
    folder = write(tmp_path / "model", {})
    for fields in ({"attention_windows": [5, 7, 0]}, {"rope_theta": [1000.0, 999.0, 5.0]}):
        with pytest.raises(UnsupportedArchitectureError, match="all layers of a kind have one"):
            Engine(folder, hf_overrides=fields)
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        Engine(folder, hf_overrides={"rope_theta": [1000.0, 1000.0]})
