"""The size of Arrow's cells as values of Python: a dictionary of a megabyte may stand for a gigabyte."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

BATCH_ROWS = 2048
"""Most rows that are values of Python at a time."""

_BATCH_BYTES = 16 << 20  # of Arrow, which long texts reach with fewer rows

_PLAIN_BYTES = 16  # of a number, a time or a boolean

Sizes = npt.NDArray[np.int64]


def rows_of_batch(size: int, rows: int) -> int:
    """How many rows are read at a time, of so many that take so many bytes."""
    return max(1, min(BATCH_ROWS, _BATCH_BYTES * rows // max(size, 1)))


def parts(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Where to cut rows of these sizes, so that a part is small, and a row that is longer than a record is alone."""
    start, size = 0, 0
    if sizes.sum() <= _BATCH_BYTES:
        yield from ((start, min(start + BATCH_ROWS, len(sizes))) for start in range(0, len(sizes), BATCH_ROWS))
        return
    for row, each in enumerate(sizes.tolist()):
        if row > start and (size + each > _BATCH_BYTES or row - start == BATCH_ROWS):
            yield start, row
            start, size = row, 0
        size += each
    yield start, len(sizes)


def cell_bytes(column: Any) -> Sizes:
    """``[rows]``: the bytes of each cell of an array."""
    types, kind, rows = import_module("pyarrow.types"), column.type, len(column)
    if hasattr(kind, "storage_type"):
        return cell_bytes(column.storage)
    if types.is_dictionary(kind):
        known = np.append(cell_bytes(column.dictionary), 0)  # the last one for null
        sizes: Sizes = known[column.indices.fill_null(len(known) - 1).to_numpy(zero_copy_only=False)]
        return sizes
    if types.is_run_end_encoded(kind):
        return np.full(rows, cell_bytes(column.values).max(initial=0), np.int64)
    if types.is_struct(kind):
        fields = (cell_bytes(column.field(index)) for index in range(kind.num_fields))
        return sum(fields, np.zeros(rows, np.int64))
    if types.is_map(kind):
        arrow = import_module("pyarrow")
        pair = arrow.struct([("key", kind.key_type), ("value", kind.item_type)])
        return cell_bytes(column.cast(arrow.list_(pair)))
    if types.is_nested(kind) and not types.is_union(kind):
        ends = np.append(0, np.cumsum(cell_bytes(column.flatten())))  # [values + 1]
        lengths = _integers(import_module("pyarrow.compute").list_value_length(column))  # [rows]
        last = np.cumsum(lengths)
        return np.asarray(ends[last] - ends[last - lengths], np.int64)
    if "string" in str(kind) or "binary" in str(kind):
        if "view" in str(kind):
            column = column.cast("large_binary" if "binary" in str(kind) else "large_string")
        return _integers(import_module("pyarrow.compute").binary_length(column))
    return np.full(rows, _PLAIN_BYTES, np.int64)


def _integers(column: Any) -> Sizes:
    return np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
