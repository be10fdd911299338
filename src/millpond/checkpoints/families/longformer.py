"""Longformer: a window for each layer, and tensors of global attention, which only classifiers of texts have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.families.renaming import AnyTensor

_GLOBAL = re.compile(r"\.attention\.self\.(query|key|value)_global\.(weight|bias)$")


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the window of each layer: an even number of tokens, half of them to each side."""
    layers, given = int(config.get("num_hidden_layers", 12)), config.get("attention_window") or 512
    windows = [int(window) for window in given] if isinstance(given, list) else [int(given)] * layers
    if len(windows) != layers or any(window < 2 or window % 2 for window in windows):
        raise ValueError(
            f"attention_window is {given!r}; it must be an even number, or one for each of {layers} layers"
        )
    return {**config, "attention_window": windows}


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The checkpoint's tensors without those of global attention."""
    return {name: tensor for name, tensor in tensors.items() if not _GLOBAL.search(name)}
