"""Attention one dense batch at a time: the reference for every other kernel, and the one that fits any call.

On a CPU a dense batch is a run of texts of equal length. On CUDA it serves what torch's packed flash attention has no
variant for, and fills texts of similar lengths up to one batch: tens of kernel starts and not thousands.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millpond.backends.torch.attention.dense import attend_run
from millpond.backends.torch.attention.padded_row import PaddedRow
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking

NAME = "sdpa"
SERVES = "every other call"


def unavailable() -> str | None:
    """It runs on any machine."""
    return None


def fits(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> bool:
    """It fits every call."""
    return True


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> Tensor:
    """Attention within each segment; see :class:`Masking` for which token attends to which."""
    if query.device.type == "cuda" and can_pad(segments, masking):
        return attend_padded(query, key, value, segments, masking)
    out = query.new_empty(query.shape)
    for run in segments.runs:
        attend_run(out, query, key, value, run, masking)
    return out


def can_pad(segments: Segments, masking: Masking) -> bool:
    """Whether tokens that are no keys can be hidden by their scores, as :func:`attend_padded` does.

    Not if a softcap follows, which limits every score, nor if a row may be left without any key: its output is zeros.
    """
    if not _hides(segments, masking):
        return True
    if segments.keys is None:
        return masking.softcap is None
    longest = max(length for length, keys in zip(segments.lengths, segments.keys, strict=True) if keys < length)
    return masking.softcap is None and (masking.window is None or masking.window >= longest)


def attend_padded(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> Tensor:
    """Attention within each segment in few dense batches, where :func:`can_pad` says so; see :class:`PaddedRow`.

    A token that is no key is hidden by one more column of the heads, 1 in queries and far below zero in its key: a mask
    would have a row for each query of each text. Columns of zeros make the width a multiple of 8, as the fused kernels
    need it; neither changes the scale.
    """
    row, dim, hides = PaddedRow.of(segments, query.device), query.shape[2], _hides(segments, masking)
    width = -(-(dim + hides) // 8) * 8
    q, k = (_widened(states.index_select(0, row.rows), width) for states in (query, key))
    v = _widened(value.index_select(0, row.rows), -(-dim // 8) * 8)
    if hides:
        q[..., dim] = 1
        # A product of query and key whose score is -10,000, or as low as the precision has numbers.
        far_below = max(-1e4 / masking.scale, torch.finfo(query.dtype).min)
        k[..., dim] = (row.hidden * far_below)[:, None]
    out = v.new_empty(len(q), query.shape[1], v.shape[2])
    for run in row.runs:
        attend_run(out, q, k, v, run, masking)
    return out.index_select(0, row.places)[..., :dim]


def _hides(segments: Segments, masking: Masking) -> bool:
    """Whether a query could see a token that is no key: repeated ones follow all others, where causality hides them."""
    return segments.keys is not None or not masking.causal


def _widened(states: Tensor, width: int) -> Tensor:
    """``[padded, heads, dim]`` with columns of zeros up to ``width``."""
    return states if states.shape[2] == width else F.pad(states, (0, width - states.shape[2]))
