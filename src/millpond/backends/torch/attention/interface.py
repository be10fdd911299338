"""The function that transformers' own model classes call for attention, registered as ``millpond``.

The name contains none of "sdpa", "flash" and "flex", which transformers checks as substrings. No mask function is
registered with it, so the classes build no mask: the segments replace it.
"""

from __future__ import annotations

from typing import Any

import torch

from millpond.backends.torch.attention.kernels import attend
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking

NAME = "millpond"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    segments: Segments | None = None,
    **_others: Any,  # passed by the classes and not needed: position_ids, use_cache, dropout (0 in evaluation), ...
) -> tuple[torch.Tensor, None]:  # ([1, tokens, heads, dim], no weights)
    """Attention within each segment of a packed row.

    The argument ``is_causal`` wins over the module's attribute: a decoder that its config makes bidirectional still has
    ``module.is_causal`` True.
    """
    if segments is None or attention_mask is not None or query.shape[0] != 1:
        raise RuntimeError("the millpond attention runs one packed row with segments, and no mask")
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", False))
    masking = Masking(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=causal,
        window=sliding_window,
        softcap=softcap,
    )
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [tokens, heads, dim]
    return attend(q, k, v, segments, masking)[None], None


def register() -> None:
    """Register the name with transformers; a second call changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
