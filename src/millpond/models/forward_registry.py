"""Which families have a packed forward of millpond's own: one row each, in the place of transformers' class."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

# model_type to "module:class"; the class takes the loaded backbone and its model_type. Where it has a ``fits``, that
# says of a loaded backbone whether the forward expresses it.
_FORWARDS = {
    "bert": "millpond.models.encoder:PackedEncoder",
    "roberta": "millpond.models.encoder:PackedEncoder",
    "xlm-roberta": "millpond.models.encoder:PackedEncoder",
    "electra": "millpond.models.encoder:PackedEncoder",
    "distilbert": "millpond.models.encoder:PackedEncoder",
    "mpnet": "millpond.models.encoder:PackedEncoder",
    "modernbert": "millpond.models.modernbert:PackedModernBert",
    "nomic_bert": "millpond.models.rotary_encoder:PackedRotaryEncoder",
    "gte": "millpond.models.rotary_encoder:PackedRotaryEncoder",
    "albert": "millpond.models.albert:PackedAlbert",
    "llama": "millpond.models.decoder:PackedDecoder",
    "llama_bidirec": "millpond.models.decoder:PackedDecoder",
    "internlm2": "millpond.models.decoder:PackedDecoder",
    "mistral": "millpond.models.decoder:PackedDecoder",
    "qwen2": "millpond.models.decoder:PackedDecoder",
    "qwen3": "millpond.models.decoder:PackedDecoder",
    "gemma": "millpond.models.decoder:PackedDecoder",
    "gemma2": "millpond.models.decoder:PackedDecoder",
    "gemma3_text": "millpond.models.decoder:PackedDecoder",
    "eurobert": "millpond.models.decoder:PackedDecoder",
}


def packed(backbone: nn.Module, model_type: str) -> nn.Module:
    """``backbone`` in its family's packed forward, which may take it apart; as it is where none fits."""
    place = _FORWARDS.get(model_type)
    if place is None:
        return backbone
    module, _, name = place.partition(":")
    forward: Any = getattr(import_module(module), name)
    if not getattr(forward, "fits", _always)(backbone):
        return backbone
    made: nn.Module = forward(backbone, model_type)
    return made.eval()


def _always(backbone: nn.Module) -> bool:
    return True
