"""Steps of a plan whose encoder reads the first part of each text, and its decoder the second (T5Gemma 2)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from millpond.backends.torch.attention.kernels import attend
from millpond.backends.torch.attention.segments import Segments, on_device
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.forwards.flow import Flow, Part


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    """Texts whose parts have similar lengths, as dense queries and keys."""

    queries: torch.Tensor  # int64 `[texts, longest]`: rows; those beyond a text's end repeat its first
    real: torch.Tensor  # bool `[texts, longest]`
    kept: torch.Tensor  # int64 `[texts, most kept]`: rows of the kept states
    mask: torch.Tensor  # bool `[texts, 1, longest, longest + most kept]`


class ReadPart(nn.Module):
    """From here on the rows of one part, whose positions begin anew."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, flow: Flow) -> None:
        """Leave the rows of the other part out."""
        ids, types, segments = flow.text
        if not flow.parts:
            flow.parts = _parts(types, segments)
        part = flow.parts[self.kind]
        lengths = [length for length in part.lengths if length]
        flow.ids, flow.segments = ids[part.rows], Segments.of(lengths, ids.device)
        flow.positions = on_device(torch.cat([torch.arange(length) for length in lengths]), ids.device)
        flow.made = {}  # rotations of other positions


def _parts(types: torch.Tensor | None, segments: Segments) -> tuple[Part, Part]:
    lengths = segments.lengths  # on the host: no graph can be captured
    kinds = torch.zeros(segments.total, dtype=torch.bool) if types is None else types.cpu() != 0
    seconds = [int(kind.sum()) for kind in kinds.split(lengths)]
    firsts = tuple(length - second for length, second in zip(lengths, seconds, strict=True))
    counts = (firsts, tuple(seconds))
    first, second = (
        Part(rows=on_device(torch.nonzero(kinds == bool(kind))[:, 0], segments.device), lengths=counts[kind])
        for kind in range(2)
    )
    return first, second


class KeepChunks(nn.Module):
    """The means of so many neighbouring states each, for the decoder; of the last ones of a text of fewer."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, flow: Flow) -> None:
        """Keep them."""
        counts = [-(-length // self.chunk) for length in flow.parts[0].lengths]
        flow.kept_counts = tuple(counts)
        if self.chunk == 1:
            flow.kept = flow.states
            return
        sizes = torch.tensor(
            [min(self.chunk, length - at) for length in flow.parts[0].lengths for at in range(0, length, self.chunk)]
        )
        owner = on_device(torch.arange(len(sizes)).repeat_interleave(sizes), flow.states.device)
        sums = flow.states.new_zeros(len(sizes), flow.states.shape[1], dtype=torch.float32)
        sums = sums.index_add_(0, owner, flow.states.float())
        flow.kept = (sums / on_device(sizes, sums.device)[:, None]).to(flow.states.dtype)


class MergedHeads(nn.Module):
    """Queries, keys and values of the states, and keys and values of those that were kept by the same linears."""

    def __init__(self, query: nn.Module, key_value: nn.Module) -> None:
        super().__init__()
        self.query, self.key_value = query, key_value

    def forward(self, flow: Flow) -> None:
        """Both."""
        flow.heads = torch.cat((self.query(flow.states), self.key_value(flow.states)), 1)
        flow.kept_heads = self.key_value(flow.kept)


class PartAttention(nn.Module):
    """Attention of a part, to its own rows within reach and, ``merged``, to all that is kept of the text."""

    def __init__(
        self, sizes: tuple[int, int, int], scale: float, before: int | None, after: int | None, *, merged: bool
    ) -> None:
        super().__init__()
        self.sizes, self.scale, self.before, self.after, self.merged = sizes, scale, before, after, merged

    def forward(self, flow: Flow) -> None:
        """``heads`` becomes the result."""
        heads, kv_heads, dim = self.sizes
        query, key, value = flow.heads.unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
        longest = flow.segments.max_seqlen
        if not self.merged and all(reach is None or reach >= longest - 1 for reach in (self.before, self.after)):
            masking = Masking(scale=self.scale, causal=False)
            flow.heads = attend(query, key, value, flow.segments, masking).flatten(1)
            return
        kept = (key[:0], value[:0])
        if self.merged:
            assert flow.kept_heads is not None
            keys, values = flow.kept_heads.unflatten(1, (-1, dim)).split(kv_heads, 1)
            kept = (keys, values)
        out = query.new_empty(query.shape)
        for batch in self._batches(flow):
            q = query[batch.queries].transpose(1, 2)  # [texts, heads, longest, dim]
            k, v = (
                torch.cat((own[batch.queries], other[batch.kept]), 1)
                .transpose(1, 2)
                .repeat_interleave(heads // kv_heads, 1)
                for own, other in zip((key, value), kept, strict=True)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask, scale=self.scale).transpose(1, 2)
            out[batch.queries[batch.real]] = mixed[batch.real]
        flow.heads = out.flatten(1)

    def _batches(self, flow: Flow) -> list[_Batch]:
        """Made once for all layers of the same reach."""
        key: Any = ("batches", self.before, self.after, self.merged)
        if key not in flow.made:
            flow.made[key] = self._make(flow)
        made: list[_Batch] = flow.made[key]
        return made

    def _make(self, flow: Flow) -> list[_Batch]:
        """Texts grouped by their lengths rounded up to powers of two."""
        lengths = flow.parts[1 if self.merged else 0].lengths
        counts = flow.kept_counts if self.merged else (0,) * len(lengths)
        groups: dict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
        start = kept = 0
        for length, count in zip(lengths, counts, strict=True):
            if length:
                groups[(length - 1).bit_length(), count.bit_length()].append((start, length, kept, count))
            start, kept = start + length, kept + count
        return [self._batch(texts, flow.heads.device) for texts in groups.values()]

    def _batch(self, texts: list[tuple[int, int, int, int]], device: torch.device) -> _Batch:
        starts, lengths, kept, counts = on_device(torch.tensor(texts).T.contiguous(), device)[:, :, None]
        rows = torch.arange(max(length for _, length, _, _ in texts), device=device)
        others = torch.arange(max(count for *_, count in texts), device=device)
        real = rows < lengths  # [texts, longest]
        back = rows[:, None] - rows  # of the key from the query
        near = torch.ones_like(back, dtype=torch.bool)
        if self.before is not None:
            near &= back <= self.before
        if self.after is not None:
            near &= -back <= self.after
        own = near & real[:, None]  # [texts, longest, longest]
        read = (others < counts)[:, None].expand(-1, len(rows), -1)
        return _Batch(
            queries=starts + torch.where(real, rows, 0),
            real=real,
            kept=kept + torch.where(others < counts, others, 0),
            mask=torch.cat((own, read), 2)[:, None],
        )
