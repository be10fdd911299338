"""Packed attention in Triton: CUDA in half precision, any lengths, windows, softcaps, biases and limited keys.

torch's flash kernel has blocks of 128 queries, most of which a short text leaves empty. Here a block fits the longest
text of the batch, and its products are those of the newest tensor cores.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking

NAME = "triton"
SERVES = "CUDA in half precision"

_LOG2_E = 1.4426950408889634


@functools.cache
def unavailable() -> str | None:
    """Why it cannot run on this machine; ``None`` if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "this GPU is older than compute capability 8.0"
    return None if find_spec("triton") is not None else "Triton is not installed"


def fits(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> bool:
    """Half precision on CUDA, and no shared prefixes."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and unavailable() is None
        and query.shape[-1] <= 256
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and not segments.shared
    )


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> Tensor:
    """Attention within each segment in one kernel, for a call that fits."""
    heads, dim = query.shape[1:]
    longest, bias, used = segments.max_seqlen, masking.bias, segments.seqused_k
    window = masking.window if masking.window is not None and masking.window < longest else None
    out = query.new_empty(query.shape)
    queries, keys, warps, stages = tile(longest, dim)
    blocks = -(-longest // queries)
    ends = segments.cu_seqlens
    _kernels().attend[((len(ends) - 1) * blocks * heads,)](
        query,
        key,
        value,
        out,
        ends,
        ends if used is None else used,
        query if bias is None else bias,
        masking.scale * _LOG2_E,
        masking.softcap or 0.0,
        window or 0,
        blocks,
        heads,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *((0, 0) if bias is None else bias.stride()[:2]),
        GROUP=heads // key.shape[1],
        DIM=dim,
        WIDTH=max(16, 1 << (dim - 1).bit_length()),
        QUERIES=queries,
        KEYS=keys,
        CAUSAL=masking.causal,
        WINDOW=window is not None,
        SOFTCAP=masking.softcap is not None,
        LIMITED=used is not None,
        BIAS=bias is not None,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def tile(longest: int, dim: int) -> tuple[int, int, int, int]:
    """Queries and keys of a block, its warps, and the blocks of keys that are loaded ahead: the fastest on an H200."""
    if longest <= 16:
        return 16, 16, 1, 1
    if longest <= 32:
        return 32, 32, 2, 1
    if dim > 128:
        return 64, 32, 4, 2
    if longest <= 64:
        return 64, 64, 4, 1
    return (128, 64, 8, 3) if 32 < dim <= 64 and longest > 256 else (64, 64, 4, 3)


@functools.cache
def _kernels() -> Any:
    """The kernel; Triton takes half a second to import, and is not there on every machine."""
    from millpond.backends.torch.attention import triton_kernels

    return triton_kernels
