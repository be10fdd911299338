"""BufferLayout: all inputs of a forward in one buffer, so that a batch goes to the device in one copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from millpond.backends.backend import PackedBatch
from millpond.backends.torch.attention.segments import Fixed, Segments
from millpond.backends.torch.cuda.buckets import Bucket

Buffer = TypeVar("Buffer", npt.NDArray[Any], torch.Tensor)


@dataclass(frozen=True, kw_only=True, eq=False)
class BufferBatch:
    """A forward's input read from a buffer; the attributes are those of :class:`~..batch.ForwardInput`."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: Segments
    token_types: torch.Tensor | None
    adapter_ids: torch.Tensor | None
    skip: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """Positions of the inputs in an int32 buffer; layouts of the same shape are equal."""

    tokens: int  # rows of the packed row
    sequences: int  # number of sequences
    types: bool  # whether there are token types
    adapters: bool  # whether there are adapters
    skip: bool  # whether there are prompts that pooling leaves out

    @classmethod
    def of(cls, packed: PackedBatch, bucket: Bucket | None = None) -> BufferLayout:
        """The layout of a batch, padded to ``bucket`` if there is one."""
        return cls(
            tokens=len(packed.ids) if bucket is None else bucket.tokens,
            sequences=len(packed.lengths) if bucket is None else bucket.sequences,
            types=packed.types is not None,
            adapters=packed.adapters is not None,
            skip=packed.skip is not None,
        )

    @property
    def size(self) -> int:
        """Number of int32 values in the buffer."""
        return sum(length for _, length in self._parts())

    def fill(self, buffer: torch.Tensor, packed: PackedBatch, bucket: Bucket | None = None) -> None:
        """Write a batch, and after it the bucket's dummy and empty sequences, into a buffer on the host."""
        parts = self._split(buffer.numpy())
        total, n = len(packed.ids), len(packed.lengths)
        tail = [] if bucket is None else bucket.tail(total)
        parts["ids"][:total], parts["ids"][total:] = packed.ids, 0  # any token will do: its row is not read
        parts["positions"][:total] = packed.positions
        if tail:
            first = packed.positions[0]  # of every sequence, as there are no shared prefixes in a bucket
            parts["positions"][total:] = first + np.concatenate([np.arange(length) for length in tail])
        if packed.types is not None:
            parts["types"][:total], parts["types"][total:] = packed.types, 0
        if packed.adapters is not None:
            parts["adapters"][:total], parts["adapters"][total:] = packed.adapters, -1
        if packed.skip is not None:
            parts["skip"][:n], parts["skip"][n:] = packed.skip, 0
        stops = np.cumsum([*packed.lengths.tolist(), *tail])
        ends = parts["cu_seqlens"]
        ends[0], ends[1 : len(stops) + 1], ends[len(stops) + 1 :] = 0, stops, self.tokens

    def batch(self, buffer: torch.Tensor, packed: PackedBatch) -> BufferBatch:
        """The forward's input as views of a buffer on the device, which holds the batch without padding."""
        views = self._split(buffer)
        segments = Segments.of(
            packed.lengths.tolist(),
            buffer.device,
            keys=packed.keys,
            prefixes=packed.prefixes,
            cu_seqlens=views["cu_seqlens"],
        )
        return self._batch(views, segments)

    def static(self, buffer: torch.Tensor, bucket: Bucket) -> BufferBatch:
        """The input of a captured forward, which reads the buffer's content at the time of the replay."""
        views = self._split(buffer)
        return self._batch(views, Fixed(cu_seqlens=views["cu_seqlens"], max_seqlen=bucket.longest, total=self.tokens))

    def _batch(self, views: dict[str, torch.Tensor], segments: Segments) -> BufferBatch:
        return BufferBatch(
            input_ids=views["ids"].long()[None],
            position_ids=views["positions"].long()[None],
            segments=segments,
            token_types=views["types"].long()[None] if self.types else None,
            adapter_ids=views["adapters"].long()[None] if self.adapters else None,
            skip=views["skip"] if self.skip else None,
        )

    def _parts(self) -> Iterator[tuple[str, int]]:
        yield "ids", self.tokens
        yield "positions", self.tokens
        yield "cu_seqlens", self.sequences + 1
        if self.types:
            yield "types", self.tokens
        if self.adapters:
            yield "adapters", self.tokens
        if self.skip:
            yield "skip", self.sequences

    def _split(self, buffer: Buffer) -> dict[str, Buffer]:
        views, start = {}, 0
        for name, length in self._parts():
            views[name] = buffer[start : start + length]
            start += length
        return views
