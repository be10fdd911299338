"""torch's packed flash attention: CUDA, float16 and bfloat16, head widths to 256.

Its signature changed between releases: 2.10 has ``is_causal`` and no window, 2.11 the window but no ``enable_gqa`` and
no ``seqused_k``, 2.12 all of them. What an older release lacks is implemented here.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking

NAME = "varlen"
SERVES = "CUDA in half precision"

_REQUIRED = frozenset(("scale", "window_size"))


@cache
def parameters() -> frozenset[str]:
    """Names of the parameters of this torch's ``varlen_attn``; empty if it has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def unavailable() -> str | None:
    """Why it cannot run on this machine; ``None`` if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not _new_enough(torch.cuda.current_device()):
        return "this GPU is older than compute capability 8.0"
    return None if parameters() >= _REQUIRED else "this torch has no varlen_attn with a window; 2.11 has one"


def fits(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> bool:
    """Half precision on CUDA, neither softcap nor bias, and keys that the kernel can limit as the segments do."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and masking.softcap is None
        and masking.bias is None
        and parameters() >= _REQUIRED
        and _new_enough(query.device.index)
        and limits_keys(segments, masking)
    )


@cache
def _new_enough(device: int | None) -> bool:
    """Whether torch's flash attention has code for this GPU."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def limits_keys(segments: Segments, masking: Masking) -> bool:
    """Whether the kernel can let each sequence attend to the keys that the segments name.

    It aligns causality and windows to the last key, not to the last token; the two agree only for a window that spans
    the whole sequence. Older releases cannot leave out keys at all, and no release has shared prefixes.
    """
    if segments.shared:
        return False
    if segments.keys is None:
        return True
    longest = max(run.length for run in segments.runs if run.keys is not None)
    narrow = masking.window is not None and masking.window < longest
    return not masking.causal and not narrow and "seqused_k" in parameters()


def window_size(masking: Masking, max_seqlen: int) -> tuple[int, int]:
    """transformers' exclusive window as the kernel's inclusive (left, right) pair; -1 is no bound.

    It must be a tuple: the kernel recognizes causality by comparing with ``(-1, 0)``.
    """
    reach = -1 if masking.window is None or masking.window >= max_seqlen else masking.window - 1
    return (reach, 0 if masking.causal else reach)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> Tensor:
    """Attention within each segment in one kernel, for a call that fits."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if segments.keys is not None:
        options["seqused_k"] = segments.seqused_k
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in parameters():
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = varlen_attn(
        readable(query),
        readable(key),
        readable(value),
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_seqlen,
        segments.max_seqlen,
        scale=masking.scale,
        window_size=window_size(masking, segments.max_seqlen),
        **options,
    )
    assert isinstance(out, Tensor)  # a pair only with return_aux
    return out


def readable(states: Tensor) -> Tensor:  # [tokens, heads, dim]
    """The same states as the kernel reads them: without a copy if each head's numbers are in a row of aligned 16 bytes.

    Queries, keys and values cut out of one product are.
    """
    *strides, last = states.stride()
    eight = 16 // states.element_size()
    aligned = states.data_ptr() % 16 == 0 and all(stride % eight == 0 for stride in strides)
    return states if last == 1 and aligned else states.clone(memory_format=torch.contiguous_format)
