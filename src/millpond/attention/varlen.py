"""torch's packed flash attention: CUDA, float16 and bfloat16, head widths to 256.

The function moved between releases: 2.10 has ``is_causal`` and no window, 2.11 the window but no ``enable_gqa``, 2.12
both. Its signature is read once, and missing abilities are made up for here.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from millpond.attention import sdpa
from millpond.attention.segments import Segments
from millpond.attention.signature import Masking


@cache
def abilities() -> frozenset[str]:
    """Names of the parameters that this torch's ``varlen_attn`` takes; empty where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def fits(query: torch.Tensor, masking: Masking) -> bool:
    """Whether the kernel can take this call."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and masking.softcap is None
        and masking.bias is None
        and {"scale", "window_size"} <= abilities()
    )


def window_size(masking: Masking, max_seqlen: int) -> tuple[int, int]:
    """transformers' exclusive window as the inclusive (left, right) pair of the kernel; -1 is no bound.

    It must be a tuple: the kernel finds out about causality by comparing with ``(-1, 0)``.
    """
    reach = -1 if masking.window is None or masking.window >= max_seqlen else masking.window - 1
    return (reach, 0 if masking.causal else reach)


def _misaligned(segments: Segments, masking: Masking) -> bool:
    """Whether the kernel cannot limit the keys of these segments.

    It lays causality and windows along the last key, not along the last token, which is the same only for a window
    that spans the whole sequence; and older releases cannot leave keys out at all. Shared prefixes are sdpa's alone.
    """
    if segments.shared:
        return True
    if segments.keys is None:
        return False
    longest = max(run.length for run in segments.runs if run.keys is not None)
    narrow = masking.window is not None and masking.window < longest
    return masking.causal or narrow or "seqused_k" not in abilities()


def attend(
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    segments: Segments,
    masking: Masking,
) -> torch.Tensor:  # [tokens, heads, dim]
    """Attention within each segment in one kernel."""
    from torch.nn.attention.varlen import varlen_attn

    if _misaligned(segments, masking):
        return sdpa.attend(query, key, value, segments, masking)
    options: dict[str, Any] = {}
    if segments.keys is not None:
        options["seqused_k"] = segments.seqused_k
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in abilities():
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_seqlen,
        segments.max_seqlen,
        scale=masking.scale,
        window_size=window_size(masking, segments.max_seqlen),
        **options,
    )
    assert isinstance(out, torch.Tensor)  # a pair only with return_aux
    return out
