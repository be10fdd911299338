"""Qwen3.5's text: a checkpoint that reads images too has it in a model of its own, beside the tower for images."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.families.renaming import AnyTensor

logger = logging.getLogger(__name__)

# What no text passes: the tower for images and videos, and layers that guess the tokens after the next one.
_UNREAD = re.compile(r"^(?:model\.)?(visual|mtp)\.")


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json of the text model, with the whole checkpoint's classes."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return {**config, "model_type": "qwen3_5_text"}
    # Fields of both parts, such as the user's overrides, have precedence over those of the text alone.
    own = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
    return {**text, **own, "model_type": "qwen3_5_text"}


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The text model's tensors, under the names that it has alone."""
    unread = sorted({match[1] for name in tensors if (match := _UNREAD.match(name))})
    if unread:
        logger.warning("only texts are read: the tensors of %s are left out", " and ".join(unread))
    return {
        re.sub(r"^(model\.)?language_model\.", "", name): tensor
        for name, tensor in tensors.items()
        if not _UNREAD.match(name)
    }
