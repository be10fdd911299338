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
        self._in_full: tuple[torch.Tensor, torch.Tensor] | None = None
        if type(norm) is nn.LayerNorm and _fits(norm):
            self._in_full = (norm.weight.detach().float(), norm.bias.detach().float())

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # [tokens, hidden], both
        """``[tokens, hidden]``; ``states`` are used up."""
        plain = self._in_full is None or torch.compiler.is_compiling()  # a compiler makes one pass of it as well
        kernels = None if plain else library()
        if kernels is None or states.stride(1) != 1 or residual.stride(1) != 1:
            return self.norm(states.add_(residual))  # type: ignore[no-any-return]
        assert isinstance(self.norm, nn.LayerNorm) and self._in_full is not None
        weight, bias = self._in_full
        kernels.millpond_add_norm(
            states.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            *states.shape,
            states.stride(0),
            residual.stride(0),
            self.norm.eps,
            torch.get_num_threads(),
        )
        return states


def _fits(norm: nn.LayerNorm) -> bool:
    weight, bias = norm.weight, norm.bias
    return (
        weight is not None
        and bias is not None
        and weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and len(norm.normalized_shape) == 1
        and weight.numel() % _LANES == 0
        and weight.numel() <= _WIDEST
        and library() is not None
    )
