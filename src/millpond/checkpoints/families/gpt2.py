"""GPT-2: its config's older names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the sizes under the names that other families use; transformers accepts both."""
    return {_NAMES.get(key, key): value for key, value in config.items()}
