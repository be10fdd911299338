"""BART: its sizes under the names that other families use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.errors import ModelLoadError

_NAMES = {"d_model": "hidden_size", "activation_function": "hidden_act"}
# Rows of the tables of positions before a text's first.
_OFFSET = 2


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the tables of positions as long as they are; refuses what is no longer computed so."""
    if config.get("normalize_before") or config.get("add_final_layer_norm"):
        raise ModelLoadError(
            f"{name}: a BART that normalizes what its layers read (normalize_before or add_final_layer_norm in "
            "config.json) is not run; load facebook/bart-large-mnli, whose layers normalize their sums"
        )
    if config.get("pad_token_id", _OFFSET - 1) != _OFFSET - 1:
        raise ModelLoadError(f"{name}: pad_token_id {config['pad_token_id']} of config.json is not BART's, which is 1")
    native = {_NAMES.get(key, key): value for key, value in config.items()}
    return native | {"max_position_embeddings": int(config.get("max_position_embeddings", 1024)) + _OFFSET}
