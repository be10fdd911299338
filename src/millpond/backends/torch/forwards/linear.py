"""A linear layer with its activation, in the fastest form for its device and precision."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from millpond.backends.torch.cuda import fused

# config.hidden_act to oneDNN's name of the fused form; None is no activation.
_FUSED: dict[str | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}


# On CUDA cuBLAS applies the activation as it writes the product, in its tanh form and to sums in float32. Measured on
# an H200: a quarter less time, and nearer to the exact form in float32 than the exact one of rounded sums is.
_GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh")


def linear(weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> nn.Module:
    """``activation(x weight^T + bias)`` with ``weight [out, in]``.

    On a CPU in bfloat16 oneDNN keeps the weight in its own order and applies the activation as it writes the product.
    That saves an eighth of the time of a large product, a third of a small one's, and all of the activation's.
    """
    if _suits_onednn(weight, activation):
        return ReorderedLinear(weight, bias, activation)
    return PlainLinear(weight, bias, activation)


def joined(*parts: Any, activation: str | None = None) -> nn.Module:
    """One linear layer whose output is those of ``parts`` side by side."""
    if len(parts) == 1:  # without a copy
        bias = parts[0].bias
        return linear(parts[0].weight.detach(), None if bias is None else bias.detach(), activation)
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    return linear(weight, bias, activation)


class ReorderedLinear(nn.Module):
    """oneDNN's form: the weight in its blocked order, the activation fused."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
        super().__init__()
        # An opaque tensor does not fit into a state dict, so it is an attribute.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self.out_features = weight.shape[0]
        self.weights = weight.numel()
        self.activation = activation
        self._name, self._algorithm = _FUSED[activation]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        """Multiply, add, activate."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, self._name, [], self._algorithm
        )
        return out

    def plain(self) -> PlainLinear:
        """The same layer in torch's own form."""
        return PlainLinear(self._weight.to_dense(), self._bias, self.activation)


class PlainLinear(nn.Module):
    """torch's own product, then the activation."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.activation = activation
        self._activate = activation_of(activation)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        """Multiply, add, activate."""
        if self.activation in _GELU and self.bias is not None and type(self.weight) is nn.Parameter and _in_half(rows):
            out: torch.Tensor = torch._addmm_activation(self.bias, rows, self.weight.t(), use_gelu=True)
            return out
        return self._activate(F.linear(rows, self.weight, self.bias))


class GatedProduct(nn.Module):
    """``activation(x gate^T) * (x up^T)``; on CUDA both are one product, and the rest is one pass."""

    def __init__(
        self,
        gate: tuple[torch.Tensor, torch.Tensor | None],  # weight [inner, in] and bias [inner]
        up: tuple[torch.Tensor, torch.Tensor | None],
        activation: str | None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self._activate = activation_of(activation)
        self.both: nn.Module | None = None
        if gate[0].device.type == "cuda" and (gate[1] is None) == (up[1] is None):
            biases = [bias for _, bias in (gate, up) if bias is not None]
            self.both = PlainLinear(torch.cat((gate[0], up[0])), torch.cat(biases) if biases else None, None)
            return
        self.gate_proj = linear(*gate, activation)
        self.up_proj = linear(*up)

    @classmethod
    def of(cls, gate: Any, up: Any, activation: str | None) -> GatedProduct:
        """Of two linear layers."""
        first, second = ((part.weight.detach(), _detached(part.bias)) for part in (gate, up))
        return cls(first, second, activation)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [tokens, in] -> [tokens, inner]
        """Both products, the activation of the first one, and their product."""
        if self.both is None:
            gated: torch.Tensor = self.gate_proj(rows).mul_(self.up_proj(rows))
            return gated
        both: torch.Tensor = self.both(rows)
        if self.activation in fused.ACTIVATIONS and fused.fits(both):
            return fused.gated(both, self.activation)
        gate, up = both.chunk(2, -1)
        return self._activate(gate) * up


def _detached(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()


def bound_compiled_products() -> None:
    """Bound the number of compiled products that oneDNN keeps; without effect once the process has used oneDNN.

    oneDNN compiles one for every shape, of up to a megabyte, and keeps a thousand of them by default, and torch as many
    again for each thread: gigabytes after a million texts. The bound is 64, and a batch needs a dozen. Values in the
    environment (``ONEDNN_PRIMITIVE_CACHE_CAPACITY``, ``LRU_CACHE_CAPACITY``) have precedence.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")


def activation_of(name: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation that a config names; ``None`` is the identity."""
    if name in _DIRECT:
        return _DIRECT[name]
    from transformers.activations import ACT2FN

    activate: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[name]
    return activate


def _identity(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _tanh_gelu(rows: torch.Tensor) -> torch.Tensor:
    return F.gelu(rows, approximate="tanh")


# torch's own functions take one pass; transformers computes some of these step by step.
_DIRECT: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: _identity,
    "gelu": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def _in_half(rows: torch.Tensor) -> bool:
    """Whether cuBLAS can apply an activation to a product of ``rows``."""
    return (
        rows.device.type == "cuda"
        and rows.dtype in (torch.float16, torch.bfloat16)
        and rows.dim() == 2
        and hasattr(torch, "_addmm_activation")
        and not torch.compiler.is_compiling()
    )


def _suits_onednn(weight: torch.Tensor, activation: str | None) -> bool:
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or activation not in _FUSED:
        return False
    # These operators are not public; without them it is only slower.
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )
