"""Segment writer: documents of memory or of other segments as the file of a new segment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs.residual import ResidualCodec
from millpond.late_interaction.codecs.rows import INT8, Codec
from millpond.late_interaction.plaid.storage.array_file import ArrayFileWriter, ArraySpec
from millpond.late_interaction.plaid.storage.columns import ByteStrings, Columns, Ids

# Rows encoded or copied at a time.
_BLOCK = 1 << 16
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Documents to copy.

    Attributes:
        columns: The documents.
        live: bool ``[documents]``, those to copy; ``None`` for all.
    """

    columns: Columns
    live: npt.NDArray[np.bool_] | None = None

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64 ``[copied documents + 1]`` into the copied tokens."""
        return _copied_offsets(self.columns.offsets, self.live)

    def runs(self) -> npt.NDArray[np.int64]:
        """int64 ``[runs, 2]``: first document and the one after the last of each run to copy."""
        count = len(self.columns)
        if self.live is None:
            return np.array([[0, count]] if count else [], dtype=np.int64).reshape(-1, 2)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self.live, [False])).astype(np.int8)))
        return edges.reshape(-1, 2)


def write_segment(
    path: Path,
    sources: Sequence[Source],
    *,
    dim: int,
    codec: ResidualCodec | None,
    encode: bool,
    threads: int | None = None,
) -> tuple[int, int]:
    """Write a file. The caller syncs it.

    Args:
        path: The file; it must not exist.
        sources: The documents, one after the other, all of one width.
        dim: Columns of a row.
        codec: The codec of the segment; ``None`` keeps int8 rows without codes.
        encode: Encode the rows of sources that have codes anew, from their int8 rows.
        threads: Most threads; ``None`` is as many as torch uses.

    Returns:
        Its documents and token rows.
    """
    ids = ByteStringsPlan([source.columns.ids.strings for source in sources], sources)
    texts = ByteStringsPlan([source.columns.texts for source in sources], sources)
    metadata = ByteStringsPlan([source.columns.metadata for source in sources], sources)
    offsets = _joined([source.offsets for source in sources])
    hashes = Ids.of(
        ByteStrings(data=np.empty(0, dtype=np.uint8), offsets=ids.offsets),
        np.concatenate([_copied(source.columns.ids.hash_of_each, source.live) for source in sources]),
    )
    documents, tokens = len(offsets) - 1, int(offsets[-1])
    sizes = {name: int(plan.offsets[-1]) for name, plan in (("ids", ids), ("texts", texts), ("metadata", metadata))}
    specs = segment_specs(documents, tokens, sizes, dim=dim, rows=INT8, codec=codec)
    with ArrayFileWriter(path, specs) as file:
        file.write("offsets", offsets)
        file.write("id_hashes", hashes.hashes)
        file.write("id_order", hashes.order)
        for name, plan in (("id", ids), ("text", texts), ("metadata", metadata)):
            file.write(f"{name}_offsets", plan.offsets)
            plan.write(file, {"id": "ids", "text": "texts", "metadata": "metadata"}[name])
        start = 0
        for source in sources:
            for block in _token_blocks(source):
                stored = _encoded(block, dim, codec, encode, threads)
                for name, values in stored.items():
                    file.write(name, values, start)
                start += len(next(iter(stored.values())))
    return documents, tokens


class ByteStringsPlan:
    """Byte strings of several sources, to be written as one array."""

    def __init__(self, strings: Sequence[ByteStrings], sources: Sequence[Source]) -> None:
        self._strings = strings
        self._sources = sources
        self.offsets = _joined(
            [_copied_offsets(some.offsets, source.live) for some, source in zip(strings, sources, strict=True)]
        )

    def write(self, file: ArrayFileWriter, name: str) -> None:
        """Write the array."""
        start = 0
        for some, source in zip(self._strings, self._sources, strict=True):
            for pieces in _blocks(source.runs(), some.offsets, _BLOCK_BYTES):
                block = _gather(some.data, pieces)
                file.write(name, block, start)
                start += len(block)


def segment_specs(
    documents: int, tokens: int, sizes: Mapping[str, int], *, dim: int, rows: Codec, codec: ResidualCodec | None
) -> dict[str, ArraySpec]:
    """The arrays of a segment's file, in order.

    Args:
        documents: How many there are.
        tokens: Their token rows.
        sizes: Bytes of all ``ids``, ``texts`` and ``metadata``.
        dim: Columns of a row.
        rows: How rows are packed.
        codec: What codes, and residuals in place of the rows, refer to; ``None`` without codes.
    """
    specs = {"offsets": ArraySpec(dtype="int64", shape=(documents + 1,))}
    if rows.scaled:
        specs["scales"] = ArraySpec(dtype="float16", shape=(tokens,))
    if codec is not None:
        specs["codes"] = ArraySpec(dtype="uint16", shape=(tokens,))
    if codec is not None and codec.bits:
        specs["residuals"] = ArraySpec(dtype="uint8", shape=(tokens, codec.width))
    else:
        specs["rows"] = ArraySpec(dtype=rows.dtype.name, shape=(tokens, rows.width(dim)))
    for one, many in (("id", "ids"), ("text", "texts"), ("metadata", "metadata")):
        specs[many] = ArraySpec(dtype="uint8", shape=(sizes[many],))
        specs[f"{one}_offsets"] = ArraySpec(dtype="int64", shape=(documents + 1,))
        if one == "id":
            specs["id_hashes"] = ArraySpec(dtype="uint64", shape=(documents,))
            specs["id_order"] = ArraySpec(dtype="uint32", shape=(documents,))
    return specs


def _encoded(
    block: dict[str, npt.NDArray[Any]],
    dim: int,
    codec: ResidualCodec | None,
    encode: bool,
    threads: int | None,
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a block of tokens as the segment stores them."""
    if codec is None or ("codes" in block and not encode):
        return block
    encoded = codec.encode(INT8.unpack(block["rows"], block["scales"], dim), threads=threads)
    if not codec.bits:
        return {"codes": encoded.codes, "rows": block["rows"], "scales": block["scales"]}
    return {"codes": encoded.codes, "residuals": encoded.residuals, "scales": encoded.scales}


def _token_blocks(source: Source) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """The arrays of the tokens to copy, a block at a time."""
    for pieces in _blocks(source.runs(), source.columns.offsets, _BLOCK):
        yield {name: _gather(array, pieces) for name, array in source.columns.token_arrays.items()}


def _blocks(runs: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], size: int) -> Iterator[list[tuple[int, int]]]:
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


def _copied(array: npt.NDArray[Any], live: npt.NDArray[np.bool_] | None) -> npt.NDArray[Any]:
    return array if live is None else array[live]


def _copied_offsets(offsets: npt.NDArray[np.int64], live: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int64]:
    if live is None:
        return offsets
    lengths = np.diff(offsets)[live]
    return np.concatenate(([0], np.cumsum(lengths)))


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Offsets of several arrays that are concatenated."""
    joined = [np.zeros(1, dtype=np.int64)]
    end = 0
    for part in parts:
        joined.append(part[1:] + end)
        end += int(part[-1])
    return np.concatenate(joined)
