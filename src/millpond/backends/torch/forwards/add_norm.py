"""A sum and the norm after it, in one pass where a kernel has both."""

from __future__ import annotations

import torch
from torch import nn

from millpond.backends.torch.cuda import fused
from millpond.backends.torch.forwards.rms_norm import RMSNorm
from millpond.backends.torch.operands import LANES, kernels_for

# Columns that the kernel's buffer holds.
_WIDEST = 4096


class AddNorm(nn.Module):
    """The end of a post-norm block, ``norm(states + residual)``: one pass on a CPU in bfloat16, and on CUDA."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # [tokens, hidden], both
        """``[tokens, hidden]``; ``states`` is overwritten."""
        norm = self.norm
        if type(norm) is nn.LayerNorm and norm.weight is not None and fused.fits(states, residual):
            return fused.add_layer_norm(residual, states, norm.weight, norm.bias, norm.eps, keep=False)
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


def add_and_norm(hidden: torch.Tensor, states: torch.Tensor | None, norm: nn.Module) -> torch.Tensor:
    """The beginning of a pre-norm block: add ``states`` to ``hidden`` in place, and return ``norm(hidden)``.

    Args:
        hidden: ``[tokens, width]``.
        states: ``[tokens, width]`` of the block before; ``None``: there was none.
        norm: Any norm; one that returns its argument may return ``hidden`` itself.
    """
    if fused.fits(hidden, hidden if states is None else states):
        if type(norm) is nn.LayerNorm and norm.weight is not None:
            return fused.add_layer_norm(hidden, states, norm.weight, norm.bias, norm.eps, keep=True)
        if type(norm) is RMSNorm and norm.weight.dim() == 1:
            return fused.add_rms_norm(hidden, states, norm.weight, norm.eps, keep=True, centred=norm.centred)
    normed: torch.Tensor = norm(hidden if states is None else hidden.add_(states))
    return normed


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
