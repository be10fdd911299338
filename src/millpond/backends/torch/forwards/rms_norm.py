"""RMSNorm in the fastest form for its device."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import nn

from millpond.backends.torch.operands import LANES, kernels_for


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, computed in float32 and rounded as transformers does."""

    weight: torch.Tensor  # `[dim]`, or `[heads, dim]` for rows `[tokens, heads, dim]`

    def __init__(self, weight: torch.Tensor, eps: float, *, centred: bool = False) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach())
        self.eps = eps
        self.centred = centred

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [..., dim]
        """Normalize into a new tensor."""
        dim = rows.shape[-1:]
        kernels = kernels_for(rows, self.weight) if self._suits(rows) else None
        if kernels is not None:
            return self._by_kernel(rows, kernels)
        if rows.device.type == "cpu":
            normed = _divided(rows, self.eps)
        elif self.centred or self.weight.dim() > 1:
            normed = F.rms_norm(rows, dim, None, self.eps)
        else:
            return F.rms_norm(rows, dim, self.weight, self.eps)
        # Rounding 1 + weight to half precision would change the weight.
        return normed.addcmul_(normed, self.weight) if self.centred else normed.mul_(self.weight)

    def _suits(self, rows: torch.Tensor) -> bool:
        weight = self.weight
        return (
            rows.dtype is torch.bfloat16  # first what most calls fail
            and rows.device.type == "cpu"
            and rows.shape[1:] == weight.shape
            and rows.dim() == weight.dim() + 1
            and rows.shape[-1] % LANES == 0
        )

    def _by_kernel(self, rows: torch.Tensor, kernels: ctypes.CDLL) -> torch.Tensor:
        out = torch.empty(rows.shape, dtype=rows.dtype)
        heads = rows if rows.dim() == 3 else rows[:, None]  # [tokens, heads, dim]
        kernels.millpond_rms_norm(
            heads.data_ptr(),
            out.data_ptr(),
            self.weight.data_ptr(),
            *heads.shape,
            *heads.stride()[:2],
            self.weight.stride(0) if self.weight.dim() == 2 else 0,
            float(self.centred),
            self.eps,
            torch.get_num_threads(),
        )
        return out


def _divided(rows: torch.Tensor, eps: float) -> torch.Tensor:  # [..., dim]
    """``x / sqrt(mean(x^2) + eps)``. torch's rms_norm on a CPU runs each step in float32, up to 30 times as long.

    The last step is a batch norm of one sample whose channels are the rows: ``(x - 0) / sqrt(variance + eps)`` in one
    pass, computed in float32.
    """
    flat = rows.reshape(1, -1, rows.shape[-1])  # [1, n, dim]
    norms = torch.linalg.vector_norm(flat[0], dim=-1, dtype=torch.float32)  # [n]
    squares = norms.square_().div_(rows.shape[-1])
    zeros = torch.zeros_like(squares)
    return torch.batch_norm(flat, None, None, zeros, squares, False, 0.0, eps, False).view(rows.shape)
