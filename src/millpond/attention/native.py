"""Attention in one compiled pass: a CPU's kernel in bfloat16, for processors that multiply it (AVX512-BF16)."""

from __future__ import annotations

import ctypes

import torch

from millpond.attention import products
from millpond.attention.segments import Segments
from millpond.attention.signature import Masking
from millpond.native.library import library

# Columns of a vector, in which heads are read.
_LANES = 16
# Query rows of which a thread takes one head at a time, as kUnit in attention.cpp.
_UNIT = 512
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
        ("longest", _int),
        ("before", _int),
        ("after", _int),
        ("threads", _int),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    ]


def fits(query: torch.Tensor, masking: Masking) -> bool:
    """Whether the kernel can take this call: a CPU's in bfloat16, with heads of whole vectors."""
    return (
        query.dtype is torch.bfloat16
        and query.device.type == "cpu"
        and query.shape[-1] % _LANES == 0
        and (masking.bias is None or masking.bias.dtype is torch.bfloat16)
        and not (torch.is_grad_enabled() and query.requires_grad)
        and library() is not None
    )


def attend(
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    segments: Segments,
    masking: Masking,
) -> torch.Tensor:  # [tokens, heads, dim]
    """Attention within each segment."""
    if not _suits(query, key, value, segments, masking):
        return products.attend(query, key, value, segments, masking)
    kernels = library()
    assert kernels is not None
    query, key, value = (states if states.stride(2) == 1 else states.contiguous() for states in (query, key, value))
    out = torch.empty(query.shape, dtype=query.dtype)
    prefixes = segments.prefixes
    bias = None if masking.bias is None else masking.bias.contiguous()
    longest = segments.max_seqlen
    if prefixes is not None:
        longest += int((prefixes[:, 1] - prefixes[:, 0]).max())
    before = _EVERYWHERE if masking.window is None else masking.window - 1
    dim = query.shape[2]
    each = kernels.millpond_attention_room(longest, dim)
    units = len(segments.lengths) * key.shape[1] * -(-segments.max_seqlen // _UNIT)
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
        longest,
        before,
        0 if masking.causal else before,
        threads,
        masking.scale,
        masking.softcap or 0.0,
    )
    kernels.millpond_attention(ctypes.byref(call))
    return out


def _suits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, masking: Masking) -> bool:
    """Whether everything has the shape and precision that the kernel, which checks nothing, reads it in."""
    bias = masking.bias
    if bias is not None and (
        segments.shared or bias.shape[0] != query.shape[1] or min(bias.shape[1:]) < segments.max_seqlen
    ):
        return False
    return (
        key.shape == value.shape
        and key.dtype is value.dtype is torch.bfloat16
        and key.device.type == value.device.type == "cpu"
        and key.shape[0] == query.shape[0] == segments.total
        and key.shape[2] == query.shape[2]
        and query.shape[1] % key.shape[1] == 0
    )
