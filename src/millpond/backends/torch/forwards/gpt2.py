"""GPT-2 in transformers' class, with a check of the padding switched off."""

from __future__ import annotations

from torch import nn

from millpond.checkpoints.checkpoint import Checkpoint


def finish(backbone: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """Without a padding token: with one, the class copies the ids to the host to warn of a missing mask."""
    backbone.config.pad_token_id = None  # type: ignore[union-attr]
    return backbone
