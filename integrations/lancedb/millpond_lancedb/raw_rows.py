"""Rows of any table, by whomever they were written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.ingest.sinks.raw_rows import RawPage, VectorField

_ROWS = 4096  # of one page
_KEYS = ("pk", "id", "vector_id", "row_id", "uid", "uuid")
_ROW_ID = "_rowid"
_TYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def raw_fields(table: Any) -> list[VectorField]:
    """The columns that hold lists of one size of numbers, with the distance of their index."""
    metrics: dict[str, Any] = {}
    for index in table.list_indices():
        stats = table.index_stats(index.name)
        metrics.update(dict.fromkeys(index.columns, None if stats is None else stats.distance_type))
    return [
        VectorField(
            name=field.name,
            width=field.type.list_size,
            distance=metrics.get(field.name),
            datatype=_TYPES.get(str(field.type.value_type), str(field.type.value_type)),
        )
        for field in table.schema
        if pa.types.is_fixed_size_list(field.type) and _is_number(field.type.value_type)
    ]


def raw_pages(table: Any, field: VectorField) -> Iterator[RawPage]:
    """Pages of rows with all their columns but other vectors."""
    others = [each.name for each in table.schema if not pa.types.is_fixed_size_list(each.type)]
    key = next((name for name in _KEYS if name in others), _ROW_ID)
    search = table.search().select([*others, field.name])
    for batch in (search.with_row_id(True) if key == _ROW_ID else search).to_batches(_ROWS):
        column = batch.column(field.name)
        present = ~np.asarray(column.is_null(), dtype=np.bool_)
        flat = column.fill_null([0.0] * field.width) if column.null_count else column
        numbers = flat.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        names = [name for name in batch.schema.names if name not in (field.name, _ROW_ID)]
        columns = [batch.column(name).to_pylist() for name in names]
        yield RawPage(
            ids=[str(value) for value in batch.column(key).to_pylist()],
            fields=[dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)],
            vectors=numbers.reshape(-1, field.width),
            present=present,
        )


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))
