"""Jamba: attention runs packed as everywhere; the Mamba layers, which know no segments, each get a padded batch.

A mixer's convolution and scan run on from one text into the next, so its rows are scattered to ``[texts, longest,
hidden]``, one text a row, and gathered behind it. It looks back only: what pads a text's end reaches no token.
"""

from __future__ import annotations

from collections import defaultdict
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from millpond.attention.segments import Segments
from millpond.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Texts of about one length: which rows of the packed row they are, and where these lie in a padded batch.

    Attributes:
        rows: int64 ``[tokens]``: the texts' places in the packed row.
        slots: int64 ``[tokens]``: the same tokens' places in the flattened padded batch.
        texts: How many.
        longest: Tokens of the longest.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    texts: int
    longest: int


# The mixers are called by their layers, which hand them nothing but the hidden states.
_BLOCKS: ContextVar[tuple[Block, ...]] = ContextVar("blocks")


def blocks(segments: Segments, device: torch.device) -> tuple[Block, ...]:
    """Texts grouped by the power of two that their length fills, so that padding never doubles the rows."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)  # [(first token, length)]
    start = 0
    for length in segments.lengths:
        groups[(length - 1).bit_length()].append((start, length))
        start += length
    return tuple(_block(texts, device) for _, texts in sorted(groups.items()))


def _block(texts: list[tuple[int, int]], device: torch.device) -> Block:
    longest = max(length for _, length in texts)
    rows = torch.cat([torch.arange(start, start + length) for start, length in texts])
    slots = torch.cat([torch.arange(length) + i * longest for i, (_, length) in enumerate(texts)])
    return Block(rows=rows.to(device), slots=slots.to(device), texts=len(texts), longest=longest)


class PackedJamba(nn.Module):
    """A loaded Jamba backbone that knows where the texts of its packed row begin."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        for layer in backbone.layers:  # type: ignore[union-attr]
            if hasattr(layer, "mamba"):
                layer.mamba = SegmentedMixer(layer.mamba)

    def forward(self, *, input_ids: torch.Tensor, segments: Segments, **options: Any) -> Any:
        """The backbone's own forward, the mixers told of the segments."""
        told = _BLOCKS.set(blocks(segments, input_ids.device))
        try:
            return self.backbone(input_ids=input_ids, segments=segments, **options)
        finally:
            _BLOCKS.reset(told)


class SegmentedMixer(nn.Module):
    """A Mamba mixer that begins anew at each text."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(
        self, hidden_states: torch.Tensor, cache_params: None = None, attention_mask: None = None
    ) -> torch.Tensor:  # [1, tokens, hidden] in and out
        """Scatter, mix, gather."""
        assert cache_params is None and attention_mask is None  # pooling needs no cache, a packed row no mask
        packed = hidden_states[0]
        out = torch.empty_like(packed)
        for block in _BLOCKS.get():
            padded = packed.new_zeros(block.texts * block.longest, packed.shape[-1])
            padded[block.slots] = packed[block.rows]
            mixed = self.mixer(hidden_states=padded.view(block.texts, block.longest, -1))
            out[block.rows] = mixed.flatten(0, 1)[block.slots]
        return out[None]


def finish(backbone: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """The backbone with its mixers wrapped."""
    return PackedJamba(backbone)
