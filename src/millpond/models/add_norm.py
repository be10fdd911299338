"""The end of a post-norm block: add what went in, and normalize."""

from __future__ import annotations

import torch
from torch import nn

from millpond.native.library import library

# Columns of a vector, and the columns that the kernel has room for.
_LANES, _WIDEST = 16, 4096


class AddNorm(nn.Module):
    """``norm(states + residual)``, in one pass on a CPU in bfloat16 where the compiled kernels are."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self._plain = type(norm) is not nn.LayerNorm or not _fits(norm)

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # [tokens, hidden], both
        """``[tokens, hidden]``; ``states`` are used up."""
        norm = self.norm
        kernels = None
        # A compiler makes one pass of it as well.
        if not self._plain and not torch.compiler.is_compiling() and _suits(norm, states, residual):
            kernels = library()
        if kernels is None:
            return norm(states.add_(residual))  # type: ignore[no-any-return]
        assert isinstance(norm, nn.LayerNorm)
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


def _fits(norm: nn.LayerNorm) -> bool:
    return (
        norm.weight is not None
        and norm.bias is not None
        and len(norm.normalized_shape) == 1
        and norm.weight.numel() % _LANES == 0
        and norm.weight.numel() <= _WIDEST
    )


def _suits(norm: nn.Module, states: torch.Tensor, residual: torch.Tensor) -> bool:
    assert isinstance(norm, nn.LayerNorm)
    return (
        all(
            given.dtype is torch.bfloat16 and given.device.type == "cpu" and given.stride(-1) == 1
            for given in (states, residual, norm.weight, norm.bias)
        )
        and states.dim() == 2
        and states.shape == residual.shape
        and states.shape[1] == norm.weight.shape[0]
        and not (torch.is_grad_enabled() and (states.requires_grad or norm.weight.requires_grad))
    )
