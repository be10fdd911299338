"""Token blocks: packed rows of documents in memory, written once each and read without a lock.

A block is an array that one writer appends to. A view is a prefix of it, with the documents of the prefix that are
live; views never change, so that a reader who holds some sees the same documents for as long as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs.rows import Codec
from millpond.late_interaction.index.metadata_filter import MetadataTable
from millpond.late_interaction.scoring.exact import rows_of
from millpond.late_interaction.scoring.memory import Memory, Scorer
from millpond.support.cached_property import cached_property
from millpond.vectors.ragged import runs

# Bytes of the rows of a full block: what a compaction copies at a time. A search takes 50 microseconds a block.
FULL_BLOCK = 1 << 28
_FIRST_ROWS = 1 << 12
_STEP = 1 << 16  # rows copied at a time

IndexArray = npt.NDArray[np.int64]
_serials = count()


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Packed documents to append."""

    ids: Sequence[str]
    texts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    lengths: IndexArray  # int64 `[n]`, rows of each
    width: int  # columns of a row before it was packed
    rows: npt.NDArray[Any]  # packed rows `[tokens, columns]`
    scales: npt.NDArray[np.float16] | None  # float16 `[tokens]` if the codec has scales, else `None`
    codes: npt.NDArray[np.uint16] | None  # uint16 `[tokens]`; `None` without centroids

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Batch:
        """The documents from ``start`` to before ``stop``."""
        first, last = int(self.lengths[:start].sum()), int(self.lengths[:stop].sum())
        return Batch(
            ids=self.ids[start:stop],
            texts=self.texts[start:stop],
            metadata=self.metadata[start:stop],
            lengths=self.lengths[start:stop],
            width=self.width,
            rows=self.rows[first:last],
            scales=None if self.scales is None else self.scales[first:last],
            codes=None if self.codes is None else self.codes[first:last],
        )


class Block:
    """An array of ``capacity`` rows that documents are appended to, by one thread at a time.

    The rows are in ``memory``; texts, metadata and codes are in host memory. ``width`` is that of rows before packing.
    """

    def __init__(self, codec: Codec, width: int, capacity: int, memory: Memory) -> None:
        self.serial = next(_serials)
        self.codec = codec
        self.width = width
        self.capacity = capacity
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.metadata: list[Mapping[str, Any]] = []
        columns = codec.width(width)
        self.rows = memory.rows(codec, columns, capacity)
        self.row_bytes = columns * codec.dtype.itemsize
        self.scale_bytes = np.dtype(np.float16).itemsize if codec.scaled else 0
        self.offsets = np.zeros(64, dtype=np.int64)  # [documents + 1], then unused
        self._table: tuple[int, MetadataTable] = (0, MetadataTable(0, list))

    @classmethod
    def of(cls, width: int, rows: int, least: int, codec: Codec, memory: Memory) -> Block:
        """An empty block for ``rows`` rows or as many as a full block has, but for at least ``least``."""
        full = FULL_BLOCK // (codec.width(width) * codec.dtype.itemsize)
        return cls(codec, width, max(least, min(max(rows, _FIRST_ROWS), full)), memory)

    def takes(self, batch: Batch) -> bool:
        """Whether the rows of a batch have this block's width; documents without rows may have come with another."""
        return batch.width == self.width or not len(batch.rows)

    def append(self, view: View, batch: Batch) -> View:
        """Write documents behind those of a view, the last one of this block; returns the view that has them too.

        What an append that failed has left behind is overwritten.
        """
        first, stop = view.rows, view.rows + len(batch.rows)
        if stop > first:
            self.rows.write(first, batch.rows, batch.scales)
        codes = view.codes
        if batch.codes is not None and codes is not None:
            codes[first:stop] = batch.codes
        documents = view.documents + len(batch)
        if documents + 1 > len(self.offsets):
            grown = np.zeros(max(documents + 1, 2 * len(self.offsets)), dtype=np.int64)
            grown[: view.documents + 1] = self.offsets[: view.documents + 1]
            self.offsets = grown
        self.offsets[view.documents + 1 : documents + 1] = first + np.cumsum(batch.lengths)
        # Behind the view there may be documents of an append that failed.
        self.ids[view.documents :] = batch.ids
        self.texts[view.documents :] = batch.texts
        self.metadata[view.documents :] = batch.metadata
        live = None if view.live is None else np.concatenate((view.live, np.ones(len(batch), dtype=np.bool_)))
        return View(block=self, documents=documents, offsets=self.offsets[: documents + 1], live=live, codes=codes)

    def view(self, codes: npt.NDArray[np.uint16] | None) -> View:
        """The view of the empty block; ``codes`` ``[capacity]`` is memory for those of its rows."""
        return View(block=self, documents=0, offsets=self.offsets[:1], live=None, codes=codes)

    def table(self, documents: int) -> MetadataTable:
        """The metadata of the first documents. Kept for the next filter."""
        known, table = self._table
        if known != documents:
            metadata = self.metadata[:documents]
            table = MetadataTable(documents, lambda: metadata)
            self._table = documents, table
        return table


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """The first documents of a block."""

    block: Block
    documents: int  # how many documents of it, deleted ones included
    offsets: IndexArray  # int64 `[documents + 1]`, of their rows
    live: npt.NDArray[np.bool_] | None  # bool `[documents]`, those that are not deleted; `None` is all
    codes: npt.NDArray[np.uint16] | None  # uint16 `[capacity]`, the centroid of each row; `None` without centroids

    @property
    def rows(self) -> int:
        """Rows, those of deleted documents included."""
        return int(self.offsets[-1])

    @cached_property
    def lengths(self) -> IndexArray:
        """int64 ``[documents]``, rows of each."""
        return np.diff(self.offsets)

    @cached_property
    def live_documents(self) -> int:
        """Documents that are not deleted."""
        return self.documents if self.live is None else int(np.count_nonzero(self.live))

    @cached_property
    def live_rows(self) -> int:
        """Their rows."""
        return self.rows if self.live is None else int(self.lengths[self.live].sum())

    @cached_property
    def searchable(self) -> npt.NDArray[np.bool_]:
        """bool ``[documents]``: those that are not deleted and have rows."""
        return self.lengths > 0 if self.live is None else self.live & (self.lengths > 0)

    @cached_property
    def all_searchable(self) -> bool:
        """Whether all are."""
        return bool(self.searchable.all())

    @property
    def dead_share(self) -> float:
        """The share of its documents or rows that is deleted, whichever is larger."""
        if self.live is None:
            return 0.0
        live = self.live_documents / self.documents
        return 1 - (min(live, self.live_rows / self.rows) if self.rows else live)

    @property
    def live_bytes(self) -> int:
        """Bytes of the rows that are not deleted."""
        return self.live_rows * self.block.row_bytes

    @property
    def bytes(self) -> int:
        """Bytes of rows, scales, codes and offsets, those of deleted documents included."""
        row = self.block.row_bytes + self.block.scale_bytes + (0 if self.codes is None else self.codes.itemsize)
        return self.rows * row + self.offsets.nbytes

    @cached_property
    def scorer(self) -> Scorer:
        """Compares queries with the documents, deleted ones included."""
        return self.block.rows.scorer(self.rows, self.offsets)

    def unpacked(self, rows: slice | IndexArray) -> npt.NDArray[np.float32]:
        """float32 ``[n, width]``: some of the rows."""
        return self.block.codec.unpack(*self.block.rows.read(rows), self.block.width)

    def without(self, documents: IndexArray) -> View:
        """The view after documents were deleted."""
        live = np.ones(self.documents, dtype=np.bool_) if self.live is None else self.live.copy()
        live[documents] = False
        return replace(self, live=live)

    def live_numbers(self) -> IndexArray:
        """int64, the documents that are not deleted."""
        return np.arange(self.documents) if self.live is None else np.flatnonzero(self.live)

    def batches(self) -> Iterator[Batch]:
        """The documents that are not deleted, about ``_STEP`` rows at a time."""
        numbers = self.live_numbers()
        ends = np.concatenate(([0], np.cumsum(self.lengths[numbers])))
        for start, stop in runs(ends, _STEP, _STEP):
            yield self._batch(numbers[start:stop])

    def _batch(self, documents: IndexArray) -> Batch:
        """Some documents, ascending, as they are stored: copies of their rows in host memory."""
        block = self.block
        starts, lengths = self.offsets[documents], self.lengths[documents]
        numbers = rows_of(starts, lengths)
        rows, scales = block.rows.read(numbers)
        return Batch(
            ids=[block.ids[i] for i in documents],
            texts=[block.texts[i] for i in documents],
            metadata=[block.metadata[i] for i in documents],
            lengths=lengths,
            width=block.width,
            rows=rows,
            scales=scales,
            codes=None if self.codes is None else self.codes[numbers],
        )
