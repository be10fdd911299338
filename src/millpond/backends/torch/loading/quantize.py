"""A loaded backbone's linear layers in eight bits.

On a CPU ``int8`` is millpond's own layer over oneDNN, which is faster than torchao's layers that need no compiler; on a
GPU ``int8`` and ``fp8`` are torchao's. ``int8`` and ``int8-all`` differ in the native backend only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from millpond.backends.torch.forwards import int8
from millpond.backends.torch.forwards.int8 import Int8Linear
from millpond.backends.torch.forwards.linear import PlainLinear, ReorderedLinear
from millpond.errors import MissingExtraError, ModelLoadError
from millpond.tasks import Quantization

logger = logging.getLogger(__name__)

# Layers kept in full precision: small ones whose rounding errors spread, or whose weight is used in other ways.
_KEPT = frozenset(("x_proj", "dt_proj", "router", "gate"))
# Widths of a GPU's eight-bit products must be multiples of this.
_UNIT = 16
_FP8_CAPABILITY = (8, 9)
_INT8_CAPABILITY = (7, 5)


def check_quantization(kind: Quantization | None, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a quantization that the device cannot run, before any weight is read."""
    if kind is None:
        return
    if device.type == "cpu":
        if kind == "fp8":
            raise ModelLoadError(
                "quantization='fp8' needs a GPU of compute capability 8.9 or more, and this is a CPU; choose int8"
            )
        if not int8.available():
            raise ModelLoadError(f"quantization={kind!r} on a CPU needs a torch with oneDNN; leave quantization out")
        return
    if device.type != "cuda":
        raise ModelLoadError(
            f"quantization={kind!r} is not available on {device.type}; leave it out, or use cuda or cpu"
        )
    needed = _FP8_CAPABILITY if kind == "fp8" else _INT8_CAPABILITY
    capability = torch.cuda.get_device_capability(device)
    if capability < needed:
        raise ModelLoadError(
            f"quantization={kind!r} needs a GPU of compute capability {needed[0]}.{needed[1]} or more, and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; leave it out"
        )
    if kind == "fp8" and dtype is not torch.bfloat16:
        raise ModelLoadError(
            f"quantization='fp8' computes in bfloat16, and dtype is {str(dtype).removeprefix('torch.')}; "
            "pass dtype='bfloat16', or choose int8"
        )
    _torchao()


def quantize(backbone: nn.Module, kind: Quantization, device: torch.device) -> nn.Module:
    """``backbone`` with the weights of its linear layers in eight bits, changed in place."""
    linears = list(_linears(backbone))
    if not linears:
        raise ModelLoadError(f"quantization={kind!r}: this model has no linear layer to quantize; leave it out")
    if device.type == "cpu":
        logger.warning(
            "quantization=%r saves memory in torch on a CPU, and is not faster than dtype='auto'; leave it out for "
            "speed",
            kind,
        )
    for parent, name, layer in linears:
        plain: Any = layer.plain() if isinstance(layer, ReorderedLinear) else layer
        if device.type == "cpu":
            plain = _as_linear(plain) if _is_conv1d(plain) else plain
            int8_layer = Int8Linear(plain.weight, plain.bias, getattr(plain, "activation", None))
            setattr(parent, name, int8_layer)
        elif not isinstance(plain, nn.Linear | PlainLinear):
            setattr(parent, name, _as_linear(plain))
    if device.type != "cpu":
        _quantize_by_torchao(backbone, kind)
    return backbone


def _linears(backbone: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, layer) of every layer to quantize; not subclasses, which may use their weight in other ways."""
    for parent in backbone.modules():
        for name, layer in parent.named_children():
            if name not in _KEPT and (type(layer) in (nn.Linear, PlainLinear, ReorderedLinear) or _is_conv1d(layer)):
                yield parent, name, layer


def _is_conv1d(layer: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, whose weight is transposed."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"


def _as_linear(layer: Any) -> nn.Linear:
    linear = nn.Linear(layer.nx, layer.nf, device="meta")
    linear.weight = nn.Parameter(layer.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return linear


def _quantize_by_torchao(backbone: nn.Module, kind: Quantization) -> None:
    torchao = _torchao()
    config = (
        torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
        if kind != "fp8"
        else torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow(), set_inductor_config=False)
    )
    chosen = {id(layer) for _, _, layer in _linears(backbone)}

    def fits(layer: nn.Module, name: str) -> bool:
        weight = getattr(layer, "weight", None)
        return id(layer) in chosen and weight is not None and all(width % _UNIT == 0 for width in weight.shape)

    torchao.quantize_(backbone, config, filter_fn=fits)


def _torchao() -> Any:
    try:
        import torchao.quantization
    except ImportError as error:
        raise MissingExtraError("quantization on a GPU needs torchao: pip install 'millpond[quantization]'") from error
    return torchao.quantization
