"""Layerwise rerankers (BAAI): language models with a head behind each of their last layers, which may end early.

``cutoff_layers`` is the option of their own code, here a key of config.json: the number of layers to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.errors import ModelLoadError, UnsupportedArchitectureError


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json in Gemma 2's or Granite's terms, with as many layers as are run; that of any other model as it is."""
    kind = config.get("model_type")
    if kind == "cost_wise_gemma":
        _check(config, {"layer_wise": True}, name)
        return {**cut_off(config, name), "model_type": "gemma2"}
    if kind == "minicpm":
        if "start_layer" in config:
            _check(config, {"head_type": "simple", "head_multi": True}, name)
        layers, width = int(config["num_hidden_layers"]), int(config["hidden_size"])
        return (cut_off(config, name) if "start_layer" in config else dict(config)) | {
            "model_type": "granite",
            "embedding_multiplier": float(config.get("scale_emb", 1)),
            "residual_multiplier": float(config.get("scale_depth", 1)) / layers**0.5,  # of all layers, run or not
            "attention_multiplier": (width // int(config["num_attention_heads"])) ** -0.5,
            "logits_scaling": 1.0,
        }
    return dict(config)


def _check(config: Mapping[str, Any], only: Mapping[str, Any], name: str) -> None:
    for key, value in only.items():
        if config.get(key) != value:
            raise UnsupportedArchitectureError(
                f"{name}: {key} {config.get(key)!r}, which millpond does not run for {config['model_type']} "
                f"(only {value!r})"
            )


def cut_off(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with as many layers as are run."""
    first, last, step = int(config["start_layer"]), int(config["num_hidden_layers"]), int(config.get("layer_sep", 1))
    value = config.get("cutoff_layers", last)
    layers = value[0] if isinstance(value, list) and len(value) == 1 else value
    if type(layers) is not int or layers not in range(first, last + 1, step):
        raise ModelLoadError(f"{name}: cutoff_layers={value!r} must be one number of layers from {first} to {last}")
    if config.get("compress_ratio", 1) not in (None, 1):
        raise UnsupportedArchitectureError(
            f"{name}: compress_ratio={config['compress_ratio']!r} averages tokens between layers, which millpond does "
            "not; leave it out"
        )
    kept = {key: value for key, value in config.items() if key != "layer_types"}
    types = config.get("layer_types")
    return {**kept, "num_hidden_layers": layers, **({} if types is None else {"layer_types": types[:layers]})}
