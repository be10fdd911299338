"""Pooling methods, in float32: ``hidden [tokens, width]``, the segments and ``skip [n]`` to ``[n, width]``.

``skip`` counts the tokens to leave out at the start of each segment: the prompt, if the checkpoint excludes it. Lengths
are read only on the device, so a CUDA graph can capture the methods; in a graph the last segments may be empty, their
result undefined.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from millpond.backends.torch.attention.segments import Segments
from millpond.values.spec import PoolingMode

# Tokens of one part of a long text on a GPU, whose kernel sums a text's column in one thread. On an H200 8 texts of
# 4,096 rows take 0.54 ms, and 0.26 ms in parts; 64 texts of 512 rows would take that, too, in place of 0.11 ms.
_PART = 1024
_LEAST = 1e-9  # that sentence-transformers divides by

Method = Callable[[torch.Tensor, Segments, "torch.Tensor | None"], torch.Tensor]


def _lengths(segments: Segments) -> torch.Tensor:
    return segments.cu_seqlens[1:] - segments.cu_seqlens[:-1]


def _kept(segments: Segments, skip: torch.Tensor | None) -> torch.Tensor:
    """``[n, 1]`` float32: tokens of each segment that are not skipped."""
    lengths = _lengths(segments)
    return (lengths if skip is None else lengths - skip).float()[:, None]


def _positions(segments: Segments) -> torch.Tensor:
    """``[tokens]`` position of each token in its segment, from 0."""
    starts = torch.repeat_interleave(segments.cu_seqlens[:-1], _lengths(segments).long(), output_size=segments.total)
    return torch.arange(segments.total, device=starts.device) - starts


def _without_skipped(
    hidden: torch.Tensor, segments: Segments, skip: torch.Tensor | None, filler: float
) -> torch.Tensor:
    """``hidden`` with the skipped tokens' rows replaced by ``filler``."""
    if skip is None:
        return hidden
    skipped = _positions(segments) < torch.repeat_interleave(
        skip, _lengths(segments).long(), output_size=segments.total
    )
    return hidden.masked_fill(skipped[:, None], filler)


def _reduced(rows: torch.Tensor, how: str, segments: Segments) -> torch.Tensor:
    """``[n, width]`` of each segment's rows.

    On a GPU texts of more than :data:`_PART` tokens are reduced in parts, whatever else is in the row. A shorter text
    is one part, and its result the same to the bit with parts and without. ``unsafe`` skips a check of the lengths that
    would wait for the device.
    """
    if rows.is_cuda and segments.max_seqlen > _PART:
        return _reduced_in_parts(rows, how, segments)
    return torch.segment_reduce(rows, how, lengths=_lengths(segments), axis=0, unsafe=True)


def _reduced_in_parts(rows: torch.Tensor, how: str, segments: Segments) -> torch.Tensor:
    """The same, first of parts of each segment, cut at multiples of :data:`_PART` from its start, then of these."""
    starts, lengths = segments.cu_seqlens[:-1], _lengths(segments)
    counts = (lengths + _PART - 1) // _PART  # [n] parts of each segment
    ends = counts.cumsum(0)  # [n] index of the first part after each
    # [most + 1] as many parts as there may be, so that their number need not be read; the last ones are empty.
    parts = torch.arange(segments.total // _PART + len(lengths) + 1, device=rows.device)
    owner = torch.searchsorted(ends, parts, right=True).clamp_(max=len(lengths) - 1)
    cuts = starts[owner] + (parts - (ends - counts)[owner]) * _PART
    cuts = torch.minimum(cuts, segments.cu_seqlens[1:][owner])
    rows = torch.segment_reduce(rows, how, lengths=cuts.diff(), axis=0, unsafe=True)
    return torch.segment_reduce(rows, how, lengths=counts, axis=0, unsafe=True)


def cls(hidden: torch.Tensor, segments: Segments, skip: torch.Tensor | None) -> torch.Tensor:
    """The first token's row."""
    starts = segments.cu_seqlens[:-1]
    firsts = starts if skip is None else starts + skip
    return hidden[firsts.clamp(max=len(hidden) - 1)]  # an empty segment starts after the last row


def lasttoken(hidden: torch.Tensor, segments: Segments, skip: torch.Tensor | None) -> torch.Tensor:
    """The last token's row."""
    return hidden[segments.cu_seqlens[1:] - 1]


def mean(hidden: torch.Tensor, segments: Segments, skip: torch.Tensor | None) -> torch.Tensor:
    """The average row."""
    return _reduced(_without_skipped(hidden, segments, skip, 0.0), "sum", segments) / _kept(segments, skip)


def mean_sqrt_len(hidden: torch.Tensor, segments: Segments, skip: torch.Tensor | None) -> torch.Tensor:
    """The sum over the square root of the count."""
    return _reduced(_without_skipped(hidden, segments, skip, 0.0), "sum", segments) / _kept(segments, skip).sqrt()


def max_(hidden: torch.Tensor, segments: Segments, skip: torch.Tensor | None) -> torch.Tensor:
    """The greatest value of each column."""
    rows = _without_skipped(hidden, segments, skip, float("-inf"))
    return _reduced(rows, "max", segments)


def weightedmean(hidden: torch.Tensor, segments: Segments, skip: torch.Tensor | None) -> torch.Tensor:
    """The average weighted by position (1, 2, 3, ...), as in SGPT; a skipped prompt still counts in the positions."""
    weights = (_positions(segments) + 1).float()[:, None]
    weights = _without_skipped(weights, segments, skip, 0.0)
    return _reduced(hidden * weights, "sum", segments) / _reduced(weights, "sum", segments)


def pooled(
    mode: PoolingMode,
    hidden: torch.Tensor,
    segments: Segments,
    skip: torch.Tensor | None,
    totals: torch.Tensor | None = None,
) -> torch.Tensor:
    """``hidden`` pooled by a mode; a mean divides by ``totals [n]``, the sums of what its rows were weighed with."""
    if totals is None or mode not in ("mean", "mean_sqrt_len", "weightedmean"):
        return METHODS[mode](hidden, segments, skip)
    rows = hidden * (_positions(segments) + 1).float()[:, None] if mode == "weightedmean" else hidden
    divisors = totals.clamp(min=_LEAST)[:, None]
    sums = _reduced(_without_skipped(rows, segments, skip, 0.0), "sum", segments)
    return sums / (divisors.sqrt() if mode == "mean_sqrt_len" else divisors)


METHODS: dict[PoolingMode, Method] = {
    "cls": cls,
    "mean": mean,
    "max": max_,
    "mean_sqrt_len": mean_sqrt_len,
    "weightedmean": weightedmean,
    "lasttoken": lasttoken,
}
