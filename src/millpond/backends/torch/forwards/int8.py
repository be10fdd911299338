"""Int8Linear: a linear layer with eight-bit weights and activations on a CPU, by oneDNN's integer product.

Each row of the input is quantized by its own range, so a text's result does not depend on the rest of the batch. oneDNN
could quantize by itself, but only with one range for the whole batch.
"""

from __future__ import annotations

import torch
from torch import nn

from millpond.backends.torch.forwards.linear import activation_of

# Elements of a temporary tensor: with more than a few MiB, its page faults cost more than its arithmetic.
_BLOCK = 1 << 18
# Rows of a block at least, since each block reads the weights again.
_ROWS = 256


class Int8Linear(nn.Module):
    """``activation(x W^T + b)`` with ``W [out, in]`` as int8, one scale for each output.

    The 256 steps of an input row run from its least value to its greatest, not symmetrically around zero: on
    all-MiniLM-L6-v2, whose states have a few large columns, a vector's error is 0.4 times that of a symmetric range.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> None:
        super().__init__()
        weight = weight.detach().float()
        scales = weight.abs().amax(1).clamp_(min=1e-12).div_(127)  # [out]
        quantized = (weight / scales[:, None]).round_().to(torch.int8)
        self.out_features, self.in_features = quantized.shape
        self.weights = quantized.numel()
        self.nbytes = quantized.element_size() * self.weights
        # Opaque tensors do not fit into a state dict: this one is an attribute, and so are the vectors [out] with it.
        self._weight = torch.ops.onednn.qlinear_prepack(quantized, None)
        self._scales = scales
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self._sums = quantized.sum(1).float() * scales
        self._bias = torch.zeros(self.out_features) if bias is None else bias.detach().float()
        self._activate = activation_of(activation)
        # Without VNNI two products are added in 16 bits; inputs of seven bits keep the sum from saturating.
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
        # Adding one half rounds, since the cast truncates.
        quantized = (wide * steps).add_(0.5 - least * steps).to(torch.uint8)
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            quantized, 1.0, 0, self._weight, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return self._activate(product.mul_(scales).addr_(least[:, 0], self._sums).add_(self._bias))


def available() -> bool:
    """Whether this build of torch has the operators, which are not public."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.onednn, name) for name in ("qlinear_prepack", "qlinear_pointwise")
    )
