"""Which keys each row of a packed row attends to, token by token and in blocks, as FlexAttention's kernels take it.

A row attends to neighbouring keys, so two numbers for each token say everything. Nothing has a row and a column for
each token; all is computed on the device from the cumulative lengths: nothing is copied, and nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from millpond.backends.torch.attention.segments import Segments

# Tokens of a block, of rows and of keys: FlexAttention's default.
BLOCK = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyBlocks:
    """The keys of each row, on the device; int32."""

    first: torch.Tensor  # `[tokens]`: first key of each row
    stop: torch.Tensor  # `[tokens]`: one past its last key; not greater than `first` if it has none
    # `[1, 1, blocks]`: blocks of keys of which some row of the block of rows attends to some
    partial_count: torch.Tensor
    partial: torch.Tensor  # `[1, 1, blocks, blocks]`: their indices; those behind the count mean nothing
    full_count: torch.Tensor  # `[1, 1, blocks]`: blocks of keys to all of which every row attends: they need no mask
    full: torch.Tensor  # `[1, 1, blocks, blocks]`: their indices

    @classmethod
    def of(cls, segments: Segments, *, causal: bool, window: int | None) -> KeyBlocks:
        """The keys of each row; ``window`` is an exclusive bound on the distance, ``None``: no bound."""
        first, stop = _keys(segments, causal=causal, window=window)
        blocks = -(-segments.total // BLOCK)
        # A row that is missing in the last block attends to nothing, so that no block of keys is full there.
        earliest, latest = _extremes(first, blocks, missing=segments.total)
        end, shortest = (-bound for bound in _extremes(-stop, blocks, missing=0))
        begin, end = earliest // BLOCK, -(-end // BLOCK)
        full_begin, full_end = -(-latest // BLOCK), shortest // BLOCK
        full_count = (full_end - full_begin).clamp_(min=0)
        partial_count = (end - begin).clamp_(min=0) - full_count
        column = torch.arange(blocks, dtype=torch.int32, device=first.device)  # [blocks]
        full = full_begin[:, None] + column  # [blocks, blocks]
        # The partial blocks are those before the full ones and those after them.
        behind = column >= (full_begin - begin)[:, None]
        partial = begin[:, None] + column + torch.where(behind, full_count[:, None], 0)
        return cls(
            first=first,
            stop=stop,
            partial_count=partial_count[None, None],
            partial=partial.clamp_(max=blocks - 1)[None, None],
            full_count=full_count[None, None],
            full=full.clamp_(max=blocks - 1)[None, None],
        )


def _keys(segments: Segments, *, causal: bool, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """First key of each token, and one past its last key: int32 ``[tokens]`` both."""
    starts, ends = segments.cu_seqlens[:-1], segments.cu_seqlens[1:]  # [n]
    text = torch.repeat_interleave(ends - starts, output_size=segments.total)  # [tokens]: index of the text
    usable = ends if segments.seqused_k is None else starts + segments.seqused_k
    first, stop = starts.index_select(0, text), usable.index_select(0, text)
    token = torch.arange(segments.total, dtype=torch.int32, device=first.device)
    if causal:
        stop = torch.minimum(stop, token + 1)
    if window is not None:
        first = torch.maximum(first, token - (window - 1))
        if not causal:
            stop = torch.minimum(stop, token + window)
    return first, stop


def _extremes(bound: torch.Tensor, blocks: int, *, missing: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest of each block's rows, int32 ``[blocks]`` both; the last block is filled with ``missing``."""
    filled = F.pad(bound, (0, blocks * BLOCK - len(bound)), value=missing).view(blocks, BLOCK)
    return filled.amin(1), filled.amax(1)
