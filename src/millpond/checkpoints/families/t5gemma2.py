"""T5Gemma 2: an encoder and a decoder with layers of Gemma 3; the towers for images beside them are not run."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.families.renaming import AnyTensor
from millpond.errors import ModelLoadError, UnsupportedArchitectureError

logger = logging.getLogger(__name__)

_UNREAD = re.compile(r"^(?:model\.)?encoder\.(vision_tower|multi_modal_projector)\.")
_ENCODER = re.compile(r"^(?:model\.)?encoder\.(?:text_model\.)?")


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the sizes that both parts have, and the terms of each part's Gemma 3 under its name."""
    encoder, decoder = (config.get(part) or {} for part in ("encoder", "decoder"))
    text = encoder.get("text_config") or {}
    if not text or not decoder:
        raise ModelLoadError(f"{name}: config.json must have an encoder with a text_config, and a decoder")
    if decoder.get("final_logit_softcapping") is not None:
        raise UnsupportedArchitectureError(
            f"{name}: final_logit_softcapping of its decoder, which millpond does not run for T5Gemma2"
        )
    sizes = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    shared = {key: decoder[key] for key in sizes if key in decoder}
    lengths = [part.get("max_position_embeddings", 131072) for part in (text, decoder)]
    return {
        **shared,
        **config,
        "max_position_embeddings": min(lengths),
        "encoder": {**text, "model_type": "gemma3_text"},
        "decoder": {**decoder, "model_type": "gemma3_text"},
    }


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The tensors of the encoder's text without what precedes them, and those of the decoder."""
    unread = sorted({match[1] for name in tensors if (match := _UNREAD.match(name))})
    if unread:
        logger.warning("only texts are read: the tensors of %s are left out", " and ".join(unread))
    return {
        _ENCODER.sub("", name).removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if not _UNREAD.match(name)
    }
