"""GPT-2: its config's older names, and a check of the padding that is switched off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from millpond.checkpoints.checkpoint import Checkpoint

_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the sizes under the names that other families use; transformers accepts both."""
    return {_NAMES.get(key, key): value for key, value in config.items()}


def finish(backbone: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """Without a padding token: with one, the class copies the ids to the host to warn of a missing mask."""
    backbone.config.pad_token_id = None  # type: ignore[union-attr]
    return backbone
