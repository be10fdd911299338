"""Families: the packed forwards that have a plan, and a backbone's native forward if it is one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from millpond.backends.kernel_check import disabled
from millpond.backends.torch.native.encoder import NativeEncoder
from millpond.backends.torch.native.kernels import Int8, Kernels, encoder_name, kernels_of
from millpond.backends.torch.native.plan import Plan
from millpond.backends.torch.native.weight_packer import NotSupported

logger = logging.getLogger(__name__)

# The packed forward's class, and the module and function of its plan; imported when a backbone is of that class.
_PLANS = {
    "PackedEncoder": ("post_norm", "bert_plan"),
    "PackedRotaryEncoder": ("post_norm", "rotary_plan"),
    "JinaEncoder": ("post_norm", "jina_plan"),
    "PackedDecoder": ("pre_norm", "decoder_plan"),
    "PackedModernBert": ("pre_norm", "modernbert_plan"),
}


def native_forward(backbone: nn.Module, int8: Int8 = "none") -> NativeEncoder | None:
    """The native forward of a packed backbone on a CPU, whose linear layers are in torch's own form.

    ``None`` if this processor has no kernels for its precision, if they were disabled, or if the backbone has something
    that they lack. The weights are copied: ``backbone`` is not needed any more. ``int8`` says which of them are in
    eight bits.
    """
    weight = next(backbone.parameters(), None)
    if type(backbone).__name__ not in _PLANS or weight is None:
        return None
    kernels = kernels_of(weight.dtype, int8=int8)
    if kernels is None or disabled(encoder_name(weight.dtype, int8)) is not None:
        return None
    try:
        return encoder_of(backbone, kernels, weight.dtype)
    except NotSupported as reason:
        logger.debug("%s runs in torch's operators: %s", type(backbone).__name__, reason)
        return None


def encoder_of(backbone: nn.Module, kernels: Kernels, dtype: torch.dtype) -> NativeEncoder:
    """The native forward of a backbone that has a plan; else it raises ``NotSupported``."""
    module, name = _PLANS[type(backbone).__name__]
    plan: Callable[[Any, Kernels, torch.dtype], Plan] = getattr(import_module(f"{__package__}.{module}"), name)
    return NativeEncoder(plan(backbone, kernels, dtype))
