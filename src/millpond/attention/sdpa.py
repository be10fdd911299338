"""Attention one run of equal lengths at a time: the reference for every other kernel, and the one that fits any call.

It serves float32 on a CPU, and float32 on CUDA, for which torch's packed flash attention has no variant.
"""

from __future__ import annotations

import torch

from millpond.attention.dense import attend_run
from millpond.attention.segments import Segments
from millpond.attention.signature import Masking

NAME = "sdpa"
SERVES = "every other call"


def unavailable() -> str | None:
    """It runs on any machine."""
    return None


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, masking: Masking) -> bool:
    """It fits every call."""
    return True


def attend(
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    segments: Segments,
    masking: Masking,
) -> torch.Tensor:  # [tokens, heads, dim]
    """Attention within each segment; see :class:`Masking` for which token attends to which."""
    out = query.new_empty(query.shape)
    for run in segments.runs:
        attend_run(out, query, key, value, run, masking)
    return out
