"""Layerwise rerankers (BAAI): language models with a head behind each of their last layers, which may end early.

``cutoff_layers`` is the option of their own code, here a key of config.json: the number of layers to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.errors import ModelLoadError, UnsupportedArchitectureError


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json in Gemma 2's terms, with as many layers as are run; any other Gemma 2 as it is."""
    if config.get("model_type") != "cost_wise_gemma":
        return dict(config)
    if not config.get("layer_wise"):
        raise UnsupportedArchitectureError(f"{name}: layer_wise false, which millpond does not run for cost_wise_gemma")
    return {**cut_off(config, name), "model_type": "gemma2"}


def cut_off(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with as many layers as are run."""
    first, last, step = (int(config[key]) for key in ("start_layer", "num_hidden_layers", "layer_sep"))
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
