"""Attention in one compiled pass: a CPU's kernel in bfloat16, for processors that multiply it (AVX512-BF16)."""

from __future__ import annotations

import ctypes

import torch

from millpond.attention import matmul_attention
from millpond.attention.segments import Segments
from millpond.attention.signature import Masking
from millpond.native.operands import LANES, kernels_for

# Bytes that all threads have together for keys, values and scores; fewer threads work where each needs much.
_MOST_ROOM = 256 << 20
# Farther than any token.
_EVERYWHERE = 1 << 40

_int, _pointer = ctypes.c_int64, ctypes.c_void_p


class _Call(ctypes.Structure):
    """``struct Call`` of attention.cpp."""

    _fields_ = [
        ("query", _pointer),
        ("key", _pointer),
        ("value", _pointer),
        ("out", _pointer),
        ("bounds", _pointer),
        ("used", _pointer),
        ("prefixes", _pointer),
        ("bias", _pointer),
        ("room", _pointer),
        ("query_token", _int),
        ("query_head", _int),
        ("key_token", _int),
        ("key_head", _int),
        ("value_token", _int),
        ("value_head", _int),
        ("out_token", _int),
        ("out_head", _int),
        ("bias_head", _int),
        ("bias_row", _int),
        ("segments", _int),
        ("heads", _int),
        ("kv_heads", _int),
        ("dim", _int),
        ("rows", _int),
        ("longest", _int),
        ("before", _int),
        ("after", _int),
        ("threads", _int),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    ]


def fits(query: torch.Tensor, masking: Masking) -> bool:
    """Whether the kernel can take this call: a CPU's in bfloat16, with heads of whole vectors."""
    operands = (query,) if masking.bias is None else (query, masking.bias)
    return query.shape[-1] % LANES == 0 and kernels_for(*operands) is not None


def attend(
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    segments: Segments,
    masking: Masking,
) -> torch.Tensor:  # [tokens, heads, dim]
    """Attention within each segment."""
    bias = masking.bias
    kernels = kernels_for(query, key, value, *(() if bias is None else (bias,)))
    if kernels is None or not _suits(query, key, value, segments, bias):
        return matmul_attention.attend(query, key, value, segments, masking)
    out = torch.empty(query.shape, dtype=query.dtype)
    prefixes = segments.prefixes
    longest = segments.max_seqlen
    if prefixes is not None:
        longest += int((prefixes[:, 1] - prefixes[:, 0]).max())
    before = _EVERYWHERE if masking.window is None else masking.window - 1
    dim = query.shape[2]
    each = kernels.millpond_attention_room(longest, dim)
    units = kernels.millpond_attention_units(len(segments.lengths), key.shape[1], segments.max_seqlen)
    threads = max(1, min(torch.get_num_threads(), units, _MOST_ROOM // each))
    room = torch.empty(threads * each, dtype=torch.uint8)
    call = _Call(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        segments.cu_seqlens.data_ptr(),
        None if segments.seqused_k is None else segments.seqused_k.data_ptr(),
        None if prefixes is None else prefixes.data_ptr(),
        None if bias is None else bias.data_ptr(),
        room.data_ptr(),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *out.stride()[:2],
        *((0, 0) if bias is None else bias.stride()[:2]),
        len(segments.lengths),
        query.shape[1],
        key.shape[1],
        dim,
        segments.max_seqlen,
        longest,
        before,
        0 if masking.causal else before,
        threads,
        masking.scale,
        masking.softcap or 0.0,
    )
    kernels.millpond_attention(ctypes.byref(call))
    return out


def _suits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, bias: torch.Tensor | None
) -> bool:
    """Whether the shapes go together; a bias has no columns for a sequence that continues another."""
    biased = bias is None or (
        not segments.shared and bias.shape[0] == query.shape[1] and min(bias.shape[1:]) >= segments.max_seqlen
    )
    return (
        biased
        and key.shape == value.shape
        and key.shape[0] == query.shape[0] == segments.total
        and key.shape[2] == query.shape[2]
        and query.shape[1] % key.shape[1] == 0
    )
