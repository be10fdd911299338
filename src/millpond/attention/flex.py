"""FlexAttention: CUDA attention with a softcap (Gemma 2), which torch's flash kernels do not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from millpond.attention.segments import Segments
from millpond.attention.signature import Masking

NAME = "flex"
SERVES = "CUDA with a softcap"


@cache
def _compiled() -> Callable[..., Any]:
    """flex_attention compiled once per process; lengths are dynamic, or every new total would compile again."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def unavailable() -> str | None:
    """Why it cannot run on this machine; ``None`` if it can."""
    return None if torch.cuda.is_available() else "no CUDA device"


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, masking: Masking) -> bool:
    """CUDA with a softcap, and neither a bias nor a shared prefix, which the masks below do not express."""
    return query.device.type == "cuda" and masking.softcap is not None and masking.bias is None and not segments.shared


def score_mod(masking: Masking) -> Callable[..., torch.Tensor] | None:
    """The softcap as FlexAttention's score modifier."""
    softcap = masking.softcap
    if softcap is None:
        return None

    def cap(score: torch.Tensor, _b: Any, _h: Any, _q: Any, _k: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def mask_mod(
    segment_ids: torch.Tensor, masking: Masking, usable: torch.Tensor | None = None
) -> Callable[..., torch.Tensor]:
    """True for a key in the query's segment that causality, the window and ``usable`` (bool ``[tokens]``) allow."""

    def allowed(_b: Any, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        inside = segment_ids[q] == segment_ids[k]
        if masking.causal:
            inside = inside & (q >= k)
        if masking.window is not None:
            inside = inside & ((q - k).abs() < masking.window)
        if usable is not None:
            inside = inside & usable[k]
        return inside

    return allowed


def _usable(segments: Segments, segment_ids: torch.Tensor) -> torch.Tensor | None:  # bool [tokens]
    """Which tokens may be attended to; ``None``: all."""
    if segments.seqused_k is None:
        return None
    ends = (segments.cu_seqlens[:-1] + segments.seqused_k).long()  # [n]
    return torch.arange(segments.total, device=segment_ids.device) < ends[segment_ids]


def attend(
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    segments: Segments,
    masking: Masking,
    *,
    flex: Callable[..., Any] | None = None,
) -> torch.Tensor:  # [tokens, heads, dim]
    """Attention within each segment, for a call that fits; ``flex`` replaces the compiled function, for tests."""
    from torch.nn.attention.flex_attention import create_block_mask

    total = segments.total
    lengths = (segments.cu_seqlens[1:] - segments.cu_seqlens[:-1]).long()
    numbers = torch.arange(len(segments.lengths), device=query.device)
    segment_ids = torch.repeat_interleave(numbers, lengths, output_size=total)  # [tokens]
    usable = _usable(segments, segment_ids)
    blocks = create_block_mask(mask_mod(segment_ids, masking, usable), None, None, total, total, device=query.device)
    out = (flex or _compiled())(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        score_mod=score_mod(masking),
        block_mask=blocks,
        scale=masking.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    result: torch.Tensor = out[0].transpose(0, 1)
    return result
