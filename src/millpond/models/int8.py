"""Int8Linear: a linear layer in eight bits on a CPU, weights and activations, in oneDNN's integer product.

Each row of the input gets a range of its own, so that a text's result does not depend on what it is batched with; a
range for the whole batch, which oneDNN could apply by itself, would make it.
"""

from __future__ import annotations

import torch
from torch import nn

from millpond.models.linear import activation_of

# Elements of a temporary: beyond a few MiB each new one costs more in page faults than its arithmetic ...
_BLOCK = 1 << 18
# ... but this many rows at least, for which the weights are worth reading once more.
_ROWS = 256


class Int8Linear(nn.Module):
    """``activation(x W^T + b)`` with ``W [out, in]`` as int8, one scale for each output.

    A row of the input runs from its least value to its greatest in 256 steps, not symmetrically around zero: on
    all-MiniLM-L6-v2, whose states have a few large columns, that leaves 0.4 of the error in a vector.

    Attributes:
        weights: Elements of the weight, which is no parameter.
        nbytes: What it occupies.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> None:
        super().__init__()
        weight = weight.detach().float()
        scales = weight.abs().amax(1).clamp_(min=1e-12).div_(127)  # [out]
        quantized = (weight / scales[:, None]).round_().to(torch.int8)
        self.out_features, self.in_features = quantized.shape
        self.weights = quantized.numel()
        self.nbytes = quantized.element_size() * self.weights
        # An opaque tensor, which no state dict can hold: kept as an attribute, as are the vectors [out] beside it.
        self._weight = torch.ops.onednn.qlinear_prepack(quantized, None)
        self._scales = scales
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self._sums = quantized.sum(1).float() * scales
        self._bias = torch.zeros(self.out_features) if bias is None else bias.detach().float()
        self._activate = activation_of(activation)
        # Without VNNI two products are added in 16 bits: seven bits of input keep that sum from saturating.
        self._steps = 255 if torch.cpu._is_vnni_supported() else 127
        self._rows = max(_ROWS, _BLOCK // max(quantized.shape))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [..., in] -> [..., out]
        """Quantize, multiply, scale back, add, activate; the last three in float32."""
        flat = rows.reshape(-1, self.in_features)
        out = flat.new_empty(len(flat), self.out_features)
        for some, into in zip(flat.split(self._rows), out.split(self._rows), strict=True):
            into.copy_(self._block(some))
        return out.view(*rows.shape[:-1], self.out_features)

    def _block(self, rows: torch.Tensor) -> torch.Tensor:  # [n, in] -> float32 [n, out]
        wide = rows.float()
        least, most = wide.amin(1, keepdim=True), wide.amax(1, keepdim=True)  # [n, 1]; aminmax takes ten times as long
        scales = (most - least).clamp_(min=1e-12).div_(self._steps)
        # x = least + scales * quantized, hence x W^T = least * (sum of W's row) + scales * (quantized W^T).
        steps = scales.reciprocal()
        # The half rounds, since the cast cuts.
        quantized = (wide * steps).add_(0.5 - least * steps).to(torch.uint8)
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            quantized, 1.0, 0, self._weight, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return self._activate(product.mul_(scales).addr_(least[:, 0], self._sums).add_(self._bias))


def available() -> bool:
    """Whether this build of torch has the operators: its own, but not public."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.onednn, name) for name in ("qlinear_prepack", "qlinear_pointwise")
    )
