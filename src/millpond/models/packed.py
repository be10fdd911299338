"""Which families have a packed forward of millpond's own: one row each, in the place of transformers' class."""

from __future__ import annotations

from importlib import import_module

from torch import nn

# model_type to "module:class"; the class takes the loaded backbone and its model_type.
_FORWARDS = {
    "bert": "millpond.models.encoder:PackedEncoder",
    "roberta": "millpond.models.encoder:PackedEncoder",
    "xlm-roberta": "millpond.models.encoder:PackedEncoder",
    "electra": "millpond.models.encoder:PackedEncoder",
    "distilbert": "millpond.models.encoder:PackedEncoder",
    "mpnet": "millpond.models.encoder:PackedEncoder",
}


def packed(backbone: nn.Module, model_type: str) -> nn.Module:
    """``backbone`` in its family's packed forward; as it is where the family has none."""
    place = _FORWARDS.get(model_type)
    if place is None:
        return backbone
    module, _, name = place.partition(":")
    forward: nn.Module = getattr(import_module(module), name)(backbone, model_type)
    return forward.eval()
