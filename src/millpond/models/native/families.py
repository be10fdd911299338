"""Families: the packed forwards that have a plan, and a backbone's native forward if it is one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from millpond.attention.kernels import disabled
from millpond.models.native.encoder import NativeEncoder
from millpond.models.native.kernels import Int8, encoder_name, kernels_of
from millpond.models.native.plan import Plan
from millpond.models.native.weight_packer import NotSupported

logger = logging.getLogger(__name__)

# The packed forward's class and the module with its plan; imported when a backbone is of that class.
_PLANS = {
    "PackedEncoder": "millpond.models.native.bert",
    "PackedDecoder": "millpond.models.native.decoder",
    "PackedModernBert": "millpond.models.native.modernbert",
    "JinaEncoder": "millpond.models.native.jina",
    "PackedRotaryEncoder": "millpond.models.native.rotary_encoder",
}


def native_forward(backbone: nn.Module, int8: Int8 = "none") -> NativeEncoder | None:
    """The native forward of a packed backbone on a CPU, whose linear layers are in torch's own form.

    ``None`` if this processor has no kernels for its precision, if they were disabled, or if the backbone has something
    that they lack. The weights are copied: ``backbone`` is not needed any more. ``int8`` says which of them are in
    eight bits.
    """
    module = _PLANS.get(type(backbone).__name__)
    weight = next(backbone.parameters(), None)
    if module is None or weight is None or disabled(encoder_name(weight.dtype, int8)) is not None:
        return None
    if (kernels := kernels_of(weight.dtype, int8=int8)) is None:
        return None
    build: Callable[[Any, Any, torch.dtype], Plan] = import_module(module).plan
    try:
        return NativeEncoder(build(backbone, kernels, weight.dtype))
    except NotSupported as reason:
        logger.debug("%s runs in torch's operators: %s", type(backbone).__name__, reason)
        return None
