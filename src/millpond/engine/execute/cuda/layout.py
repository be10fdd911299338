"""Block: everything that a forward reads, in one buffer, so that a batch goes to the device in one copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from millpond.attention.segments import Fixed, Segments
from millpond.engine.execute.batch import Batch, Packed
from millpond.engine.execute.cuda.buckets import Bucket

Buffer = TypeVar("Buffer", npt.NDArray[Any], torch.Tensor)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where what lies in an int32 buffer; layouts of one shape are equal.

    Attributes:
        tokens: Rows of the packed row.
        sequences: Places for sequences.
        types: There are token types.
        adapters: There are adapters.
        skip: There are prompts that pooling leaves out.
    """

    tokens: int
    sequences: int
    types: bool
    adapters: bool
    skip: bool

    @classmethod
    def of(cls, packed: Packed, bucket: Bucket | None = None) -> Layout:
        """For a batch as large as it is, or padded to a bucket."""
        return cls(
            tokens=len(packed.ids) if bucket is None else bucket.tokens,
            sequences=len(packed.lengths) if bucket is None else bucket.sequences,
            types=packed.types is not None,
            adapters=packed.adapters is not None,
            skip=packed.skip is not None,
        )

    @property
    def size(self) -> int:
        """Numbers in the buffer."""
        return sum(length for _, length in self._parts())

    def fill(self, block: torch.Tensor, packed: Packed, bucket: Bucket | None = None) -> None:
        """Write a batch, and behind it the bucket's dummy sequences and empty ones, into a buffer on the host."""
        parts = self._split(block.numpy())
        total, n = len(packed.ids), len(packed.lengths)
        tail = [] if bucket is None else bucket.tail(total)
        parts["ids"][:total], parts["ids"][total:] = packed.ids, 0  # any token does: nobody reads its row
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

    def batch(self, block: torch.Tensor, packed: Packed) -> Batch:
        """The forward's input in a buffer on the device that a batch was filled into, as large as it is."""
        keys = None if packed.keys is None else torch.tensor(packed.keys, dtype=torch.int32)
        segments = Segments.of(packed.lengths.tolist(), keys=packed.keys, prefixes=packed.prefixes)
        if keys is not None and segments.seqused_k is not None:
            segments = replace(segments, seqused_k=keys.to(block.device))
        views = self._split(block)
        return self._batch(views, replace(segments, cu_seqlens=views["cu_seqlens"]), packed)

    def static(self, block: torch.Tensor, bucket: Bucket) -> Batch:
        """The input of a captured forward, which reads whatever the buffer holds at its replay."""
        views = self._split(block)
        segments = Fixed(cu_seqlens=views["cu_seqlens"], max_seqlen=bucket.longest, total=self.tokens)
        return self._batch(views, segments, None)

    def _batch(self, views: dict[str, torch.Tensor], segments: Segments, packed: Packed | None) -> Batch:
        return Batch(
            requests=() if packed is None else packed.requests,
            lead=0 if packed is None else packed.lead,
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

    def _split(self, block: Buffer) -> dict[str, Buffer]:
        views, start = {}, 0
        for name, length in self._parts():
            views[name] = block[start : start + length]
            start += length
        return views
