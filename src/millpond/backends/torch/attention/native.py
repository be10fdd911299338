"""Attention in one compiled pass: the kernel of ``native/`` for a CPU in bfloat16."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.operands import LANES, kernels_for
from millpond.native import library

NAME = "native"
SERVES = "a CPU in bfloat16"

# Bytes of workspace (keys, values and scores) of all threads together; with large ones fewer threads run.
_MAX_WORKSPACE = 256 << 20
# A distance beyond any token.
_UNBOUNDED = 1 << 40

_int, _pointer = ctypes.c_int64, ctypes.c_void_p


class _AttentionCall(ctypes.Structure):
    """``struct AttentionCall`` of attention_call.h."""

    _fields_: ClassVar = [
        *((name, _pointer) for name in ("query", "key", "value", "out", "cu_seqlens", "seqused_k", "prefixes", "bias")),
        ("workspace", _pointer),
        *((f"{part}_{kind}_stride", _int) for part in ("query", "key", "value", "out") for kind in ("token", "head")),
        *((name, _int) for name in ("bias_head_stride", "bias_row_stride", "segments", "heads", "kv_heads", "dim")),
        *((name, _int) for name in ("max_rows", "max_keys", "before", "after", "threads")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
    ]


def unavailable() -> str | None:
    """Why it cannot run on this machine; ``None`` if it can."""
    return library.unavailable()


def fits(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> bool:
    """Operands that the compiled kernels read, of shapes that go together: ``attend`` takes their addresses."""
    if query.dtype is not torch.bfloat16 or query.shape[2] % LANES != 0:
        return False
    bias = masking.bias
    operands = (query, key, value) if bias is None else (query, key, value, bias)
    return kernels_for(*operands) is not None and _shapes_agree(query, key, value, segments, bias)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> Tensor:
    """Attention within each segment, for a call that fits: nothing is checked after that."""
    bias = masking.bias
    out = torch.empty(query.shape, dtype=query.dtype)
    prefixes = segments.prefixes
    max_keys = segments.max_seqlen
    if prefixes is not None:
        max_keys += int((prefixes[:, 1] - prefixes[:, 0]).max())
    before = _UNBOUNDED if masking.window is None else masking.window - 1
    call = _AttentionCall(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        segments.cu_seqlens.data_ptr(),
        None if segments.seqused_k is None else segments.seqused_k.data_ptr(),
        None if prefixes is None else prefixes.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *out.stride()[:2],
        *((0, 0) if bias is None else bias.stride()[:2]),
        len(segments.lengths),
        query.shape[1],
        key.shape[1],
        query.shape[2],
        segments.max_seqlen,
        max_keys,
        before,
        0 if masking.causal else before,
        1,
        masking.scale,
        masking.softcap or 0.0,
    )
    _run(call)
    return out


def _run(call: _AttentionCall) -> None:
    """Run the kernel in tiles if this processor has it; with as many threads as find something to do."""
    kernels, table = library.library(), library.kernel_table()
    assert kernels is not None  # else nothing fits
    tiles = table if table is not None and table.attention_bfloat16 else None
    if tiles is not None:
        workspace_bytes = tiles.attention_workspace_bfloat16(ctypes.addressof(call))  # of one thread
    else:
        workspace_bytes = kernels.millpond_attention_workspace(call.max_keys, call.dim)
    tasks = kernels.millpond_attention_tasks(call.segments, call.kv_heads, call.max_rows)
    call.threads = max(1, min(torch.get_num_threads(), tasks, _MAX_WORKSPACE // workspace_bytes))
    workspace = torch.empty(call.threads * workspace_bytes, dtype=torch.uint8)
    call.workspace = workspace.data_ptr()
    if tiles is not None:
        tiles.attention_bfloat16(ctypes.addressof(call))
    else:
        kernels.millpond_attention(ctypes.byref(call))


def _shapes_agree(query: Tensor, key: Tensor, value: Tensor, segments: Segments, bias: Tensor | None) -> bool:
    """Whether the shapes go together; a bias has no columns for the keys of a shared prefix."""
    bias_agrees = bias is None or (
        not segments.shared and bias.shape[0] == query.shape[1] and min(bias.shape[1:]) >= segments.max_seqlen
    )
    return (
        bias_agrees
        and key.shape == value.shape
        and key.shape[0] == query.shape[0] == segments.total
        and key.shape[2] == query.shape[2]
        and query.shape[1] % key.shape[1] == 0
    )
