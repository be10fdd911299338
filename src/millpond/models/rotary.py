"""Rotary positions on packed rows, where a family's forward is millpond's own."""

from __future__ import annotations

import ctypes

import torch

from millpond.native.operands import LANES, kernels_for


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``states`` turned by their positions: the two halves of a head are the two coordinates of each turn.

    One pass of the compiled kernel on a CPU in bfloat16; elsewhere three, and no concatenation. In bfloat16 at
    ModernBERT's width those take a twentieth of the time of transformers' form, which goes through float32.

    Args:
        states: ``[tokens, heads, dim]``; queries and keys may be turned together, as heads of one tensor.
        cos: ``[tokens, 1, dim]``, its two halves equal.
        sin: ``[tokens, 1, dim]``, likewise.
    """
    kernels = kernels_for(states, cos, sin) if _suits(states, cos, sin) else None
    if kernels is not None:
        return _apply_rotary_at_once(states, cos, sin, kernels)
    out = states * cos
    half = states.shape[-1] // 2
    out[..., :half].addcmul_(states[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(states[..., :half], sin[..., half:])
    return out


def _suits(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the shapes go together, and half a head has whole vectors."""
    return (
        states.dim() == 3
        and cos.shape == sin.shape == (states.shape[0], 1, states.shape[2])
        and states.shape[2] % (2 * LANES) == 0
    )


def _apply_rotary_at_once(
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
