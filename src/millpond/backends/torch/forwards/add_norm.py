"""AddNorm, the end of a post-norm block: add the block's input and normalize."""

from __future__ import annotations

import torch
from torch import nn

from millpond.backends.torch.operands import LANES, kernels_for

# Columns that the kernel's buffer holds.
_WIDEST = 4096


class AddNorm(nn.Module):
    """``norm(states + residual)``, in one pass of the compiled kernel on a CPU in bfloat16."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # [tokens, hidden], both
        """``[tokens, hidden]``; ``states`` is overwritten."""
        norm = self.norm
        if type(norm) is not nn.LayerNorm or not _suits(norm, states, residual):
            return norm(states.add_(residual))  # type: ignore[no-any-return]
        kernels = kernels_for(states, residual, norm.weight, norm.bias)
        if kernels is None:
            return norm(states.add_(residual))  # type: ignore[no-any-return]
        kernels.millpond_add_norm(
            states.data_ptr(),
            residual.data_ptr(),
            norm.weight.data_ptr(),
            norm.bias.data_ptr(),
            *states.shape,
            states.stride(0),
            residual.stride(0),
            norm.eps,
            torch.get_num_threads(),
        )
        return states


def _suits(norm: nn.LayerNorm, states: torch.Tensor, residual: torch.Tensor) -> bool:
    return (
        states.dtype is torch.bfloat16  # first what most calls fail
        and states.device.type == "cpu"
        and norm.weight is not None
        and norm.bias is not None
        and states.shape == residual.shape == (states.shape[0], *norm.normalized_shape)
        and states.dim() == 2
        and states.shape[1] % LANES == 0
        and states.shape[1] <= _WIDEST
    )
