"""Rotary positions of packed rows, for millpond's own forwards."""

from __future__ import annotations

import ctypes

import torch

from millpond.backends.torch.cuda import fused
from millpond.backends.torch.forwards.rms_norm import RMSNorm
from millpond.backends.torch.operands import LANES, kernels_for


def apply_rotary(
    states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: RMSNorm | None = None
) -> torch.Tensor:
    """``states`` rotated by their positions: column i of the first half of a head and of the second are one pair.

    It takes one pass of the compiled kernel on a CPU in bfloat16, elsewhere three and no concatenation. In bfloat16 at
    ModernBERT's width those take a twentieth of the time of transformers' form, which computes in float32. On CUDA in
    half precision it takes one pass, with the norm of the heads before it, and overwrites ``states``.
    """
    if fused.rotates(states, cos, sin):
        if norm is None:
            return fused.rotate(states, cos, sin)
        return fused.rotate(states, cos, sin, norm=norm.weight, eps=norm.eps, centred=norm.centred)
    if norm is not None:
        states = norm(states)
    kernels = kernels_for(states, cos, sin) if _suits(states, cos, sin) else None
    if kernels is not None:
        return _apply_rotary_by_kernel(states, cos, sin, kernels)
    out = states * cos
    half = states.shape[-1] // 2
    out[..., :half].addcmul_(states[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(states[..., :half], sin[..., half:])
    return out


def _suits(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel is for them, their shapes fit each other, and half a head fills whole vector registers."""
    return (
        states.dtype is torch.bfloat16  # first what most calls fail
        and states.device.type == "cpu"
        and states.dim() == 3
        and cos.shape == sin.shape == (states.shape[0], 1, states.shape[2])
        and states.shape[2] % (2 * LANES) == 0
    )


def _apply_rotary_by_kernel(
    states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kernels: ctypes.CDLL
) -> torch.Tensor:
    out = torch.empty(states.shape, dtype=states.dtype)
    kernels.millpond_apply_rotary(
        states.data_ptr(),
        out.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        *states.shape,
        *states.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        torch.get_num_threads(),
    )
    return out
