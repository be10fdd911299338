"""Families with recurrent layers: attention runs packed as in every family, the recurrent layers on padded batches.

These are Jamba's Mamba and Qwen3.5's gated delta rule, whose classes know no segments. A mixer's rows are scattered to
``[texts, longest, hidden]``, one text a row, and gathered after it. It only looks back, its short convolution included:
padding at the end of a text reaches no token.
"""

from __future__ import annotations

from collections import defaultdict
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from millpond.backends.torch.attention.segments import Segments, on_device
from millpond.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedBatch:
    """Texts of similar length: their tokens in the packed row and in a padded batch."""

    rows: torch.Tensor  # int64 `[tokens]`: index of each token in the packed row
    slots: torch.Tensor  # int64 `[tokens]`: index of the same token in the flattened padded batch
    texts: int  # number of texts
    longest: int  # tokens of the longest text


# Where layers keep a recurrent mixer: Jamba's, Qwen3.5's.
_MIXERS = ("mamba", "linear_attn")
# A context variable, since not every layer passes on to its mixer what the backbone gets.
_BATCHES: ContextVar[tuple[PaddedBatch, ...]] = ContextVar("batches")


def padded_batches(segments: Segments, device: torch.device) -> tuple[PaddedBatch, ...]:
    """Texts grouped by their length rounded up to a power of two, so that padding never doubles the rows."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)  # [(first token, length)]
    start = 0
    for length in segments.lengths:
        groups[(length - 1).bit_length()].append((start, length))
        start += length
    batches = [texts for _, texts in sorted(groups.items())]
    indices = [index for texts in batches for index in _indices(texts)]
    # One copy for all of them.
    placed = iter(on_device(torch.cat(indices), device).split([len(index) for index in indices]))
    return tuple(
        PaddedBatch(rows=next(placed), slots=next(placed), texts=len(texts), longest=_longest(texts))
        for texts in batches
    )


def _indices(texts: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens of ``[(first token, length)]``: index in the packed row and in the flattened padded batch."""
    rows = torch.cat([torch.arange(start, start + length) for start, length in texts])
    slots = torch.cat([torch.arange(length) + i * _longest(texts) for i, (_, length) in enumerate(texts)])
    return rows, slots


def _longest(texts: list[tuple[int, int]]) -> int:
    return max(length for _, length in texts)


class PackedRecurrent(nn.Module):
    """A loaded backbone whose recurrent mixers run each text of the packed row separately."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        for layer in backbone.layers:  # type: ignore[union-attr]
            for name in _MIXERS:
                if hasattr(layer, name):
                    setattr(layer, name, SegmentedMixer(getattr(layer, name)))

    def forward(self, *, input_ids: torch.Tensor, segments: Segments, **options: Any) -> Any:
        """The backbone's own forward, with the padded batches of its mixers."""
        token = _BATCHES.set(padded_batches(segments, input_ids.device))
        try:
            return self.backbone(input_ids=input_ids, segments=segments, **options)
        finally:
            _BATCHES.reset(token)


class SegmentedMixer(nn.Module):
    """A recurrent mixer whose state starts at zero for each text."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache_params: None = None,
        attention_mask: None = None,
        **_others: Any,  # what transformers' layers pass on: segments, use_cache
    ) -> torch.Tensor:  # [1, tokens, hidden] in and out
        """Scatter, mix, gather."""
        assert cache_params is None and attention_mask is None  # pooling needs no cache, a packed row no mask
        packed = hidden_states[0]
        out = torch.empty_like(packed)
        for batch in _BATCHES.get():
            padded = packed.new_zeros(batch.texts * batch.longest, packed.shape[-1])
            padded[batch.slots] = packed[batch.rows]
            mixed = self.mixer(hidden_states=padded.view(batch.texts, batch.longest, -1))
            out[batch.rows] = mixed.flatten(0, 1)[batch.slots]
        return out[None]


def finish(backbone: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """The backbone with its mixers wrapped."""
    return PackedRecurrent(backbone)
