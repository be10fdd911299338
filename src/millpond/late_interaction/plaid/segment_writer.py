"""Segment writer: documents of memory or of other segments as the file of a new segment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs.residual import ResidualCodec
from millpond.late_interaction.codecs.rows import Codec
from millpond.late_interaction.plaid.storage.array_file import ArrayFileWriter, ArraySpec
from millpond.late_interaction.plaid.storage.columns import ByteStrings, Columns, Ids

OFFSETS_OF = {"ids": "id_offsets", "texts": "text_offsets", "metadata": "metadata_offsets"}
"""The arrays of byte strings, and of their offsets."""

# Rows encoded or copied at a time.
_BLOCK = 1 << 16
_BLOCK_BYTES = 1 << 22

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Documents to copy: those that are ``live``, or all."""

    columns: Columns
    live: npt.NDArray[np.bool_] | None = None

    @property
    def offsets(self) -> IndexArray:
        """int64 ``[copied documents + 1]`` into the copied tokens."""
        return _copied_offsets(self.columns.offsets, self.live)

    def runs(self) -> IndexArray:
        """int64 ``[runs, 2]``: first document and the one after the last of each run to copy."""
        count = len(self.columns)
        if self.live is None:
            return np.array([[0, count]] if count else [], dtype=np.int64).reshape(-1, 2)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self.live, [False])).astype(np.int8)))
        return edges.reshape(-1, 2)


def write_segment(
    path: Path, sources: Sequence[Source], *, dim: int, codec: Codec, trained: ResidualCodec | None, encode: bool
) -> tuple[int, int]:
    """Write a file, which the caller syncs; returns its documents and token rows.

    Args:
        path: The file; it must not exist.
        sources: The documents, one after the other, all of one width.
        dim: Columns of a row.
        codec: How rows are packed.
        trained: What codes and residuals refer to; ``None`` keeps rows without codes.
        encode: Encode the rows of sources that have codes anew.
    """
    strings = {
        "ids": [source.columns.ids.strings for source in sources],
        "texts": [source.columns.texts for source in sources],
        "metadata": [source.columns.metadata for source in sources],
    }
    ends = {name: _joined_offsets([part.offsets for part in parts], sources) for name, parts in strings.items()}
    offsets = _joined_offsets([source.columns.offsets for source in sources], sources)
    hashes = [source.columns.ids.hash_of_each for source in sources]
    live_hashes = [
        some if source.live is None else some[source.live] for some, source in zip(hashes, sources, strict=True)
    ]
    ids = Ids.of(ByteStrings(data=np.empty(0, dtype=np.uint8), offsets=ends["ids"]), np.concatenate(live_hashes))
    documents, tokens = len(offsets) - 1, int(offsets[-1])
    sizes = {name: int(some[-1]) for name, some in ends.items()}
    with ArrayFileWriter(path, segment_specs(documents, tokens, sizes, dim=dim, codec=codec, trained=trained)) as file:
        file.write("offsets", offsets)
        file.write("id_hashes", ids.hashes)
        file.write("id_order", ids.order)
        for name, parts in strings.items():
            file.write(OFFSETS_OF[name], ends[name])
            _write_strings(file, name, parts, sources)
        start = 0
        for block in _token_blocks(sources):
            stored = block
            if trained is not None and (encode or "codes" not in block):
                stored = _encoded(block, dim, codec, trained)
            for name, values in stored.items():
                file.write(name, values, start)
            start += len(next(iter(stored.values())))
    return documents, tokens


def segment_specs(
    documents: int, tokens: int, sizes: Mapping[str, int], *, dim: int, codec: Codec, trained: ResidualCodec | None
) -> dict[str, ArraySpec]:
    """The arrays of a segment's file, in order; ``sizes`` are the bytes of all ``ids``, ``texts`` and ``metadata``."""
    specs = {"offsets": ArraySpec(dtype="int64", shape=(documents + 1,))}
    residuals = trained is not None and trained.bits > 0
    if codec.scaled or residuals:
        specs["scales"] = ArraySpec(dtype="float16", shape=(tokens,))
    if trained is not None:
        specs["codes"] = ArraySpec(dtype="uint16", shape=(tokens,))
    if trained is not None and residuals:
        specs["residuals"] = ArraySpec(dtype="uint8", shape=(tokens, trained.width))
    else:
        specs["rows"] = ArraySpec(dtype=codec.dtype.name, shape=(tokens, codec.width(dim)))
    for name, offsets in OFFSETS_OF.items():
        specs[name] = ArraySpec(dtype="uint8", shape=(sizes[name],))
        specs[offsets] = ArraySpec(dtype="int64", shape=(documents + 1,))
        if name == "ids":
            specs["id_hashes"] = ArraySpec(dtype="uint64", shape=(documents,))
            specs["id_order"] = ArraySpec(dtype="uint32", shape=(documents,))
    return specs


def _write_strings(file: ArrayFileWriter, name: str, parts: Sequence[ByteStrings], sources: Sequence[Source]) -> None:
    start = 0
    for some, source in zip(parts, sources, strict=True):
        for pieces in _blocks(source.runs(), some.offsets, _BLOCK_BYTES):
            block = _gather(some.data, pieces)
            file.write(name, block, start)
            start += len(block)


def _encoded(
    block: dict[str, npt.NDArray[Any]], dim: int, codec: Codec, trained: ResidualCodec
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a block of rows with codes, and residuals in their place if there are some."""
    encoded = trained.encode(codec.unpack(block["rows"], block.get("scales"), dim))
    if not trained.bits:
        return {**block, "codes": encoded.codes}
    return {"codes": encoded.codes, "residuals": encoded.residuals, "scales": encoded.scales}


def _token_blocks(sources: Sequence[Source]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """The arrays of the tokens to copy, a block at a time."""
    for source in sources:
        for pieces in _blocks(source.runs(), source.columns.offsets, _BLOCK):
            yield {name: _gather(array, pieces) for name, array in source.columns.token_arrays.items()}


def _blocks(runs: IndexArray, offsets: IndexArray, size: int) -> Iterator[list[tuple[int, int]]]:
    """Bounds of the elements of runs of documents, in lists of at most ``size`` elements."""
    pieces: list[tuple[int, int]] = []
    room = size
    for start, stop in zip(offsets[runs[:, 0]].tolist(), offsets[runs[:, 1]].tolist(), strict=True):
        while start < stop:
            taken = min(room, stop - start)
            pieces.append((start, start + taken))
            start, room = start + taken, room - taken
            if room == 0:
                yield pieces
                pieces, room = [], size
    if pieces:
        yield pieces


def _gather(array: npt.NDArray[Any], pieces: list[tuple[int, int]]) -> npt.NDArray[Any]:
    if len(pieces) == 1:
        return array[pieces[0][0] : pieces[0][1]]
    return np.concatenate([array[start:stop] for start, stop in pieces])


def _copied_offsets(offsets: IndexArray, live: npt.NDArray[np.bool_] | None) -> IndexArray:
    return offsets if live is None else np.concatenate(([0], np.cumsum(np.diff(offsets)[live])))


def _joined_offsets(parts: Sequence[IndexArray], sources: Sequence[Source]) -> IndexArray:
    """Offsets of the copied parts of several arrays, one after the other."""
    lengths = [np.diff(_copied_offsets(part, source.live)) for part, source in zip(parts, sources, strict=True)]
    return np.concatenate(([0], np.cumsum(np.concatenate(lengths)))).astype(np.int64)
