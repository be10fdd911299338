"""Rows of any table, by whomever they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from psycopg.sql import SQL, Identifier

from millpond.ingest.sinks.raw_rows import RawPage, VectorField, stacked

_BLOCKS = 512  # of 8 KiB, whose rows are one page; vectors of over 2 KiB are elsewhere
_TYPES = {"vector": "float32", "halfvec": "float16", "bit": "bit"}
_COLUMNS = """SELECT a.attname, t.typname, a.atttypmod, (i.indkey[0] = a.attnum AND i.indnatts = 1) IS TRUE, (
  SELECT o.opcname FROM pg_index x JOIN pg_opclass o ON o.oid = x.indclass[0]
  WHERE x.indrelid = a.attrelid AND x.indkey[0] = a.attnum AND o.opcname LIKE '%\\_ops' LIMIT 1)
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
WHERE a.attrelid = to_regclass({name}) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""
_LEAVES = """SELECT relid::regclass::text FROM pg_partition_tree(to_regclass({name})) WHERE isleaf
UNION ALL SELECT {name} WHERE NOT EXISTS (SELECT FROM pg_partition_tree(to_regclass({name})))"""

_SIZE = "SELECT pg_relation_size({leaf}::regclass) / current_setting('block_size')::int"
_PAGE = "SELECT {key}::text, {vector}, {columns} FROM {leaf} WHERE ctid >= {first}::tid AND ctid < {last}::tid"


def raw_fields(rows: Callable[..., list[Any]]) -> list[VectorField]:
    """The columns of vectors; ``rows`` makes a query."""
    return [
        VectorField(
            name=name, width=width if width > 0 else _width(rows, name), distance=operators, datatype=_TYPES[kind]
        )
        for name, kind, width, _, operators in rows(_COLUMNS)
        if kind in _TYPES
    ]


def raw_pages(connection: Any, field: VectorField) -> Iterator[RawPage]:
    """Pages of rows with all their columns but other vectors, in the order in which they are stored."""
    columns = connection.rows(_COLUMNS)
    names = [name for name, kind, *_ in columns if kind not in _TYPES]
    key = next((name for name, _, _, is_key, _ in columns if is_key), None)
    for (leaf,) in connection.rows(_LEAVES):
        ((size,),) = connection.rows(_SIZE, leaf=leaf)
        for start in range(0, size, _BLOCKS):
            parts = {
                "key": SQL("ctid") if key is None else Identifier(key),
                "vector": Identifier(field.name),
                "columns": SQL(", ").join(
                    SQL("{}::text").format(each) for each in map(Identifier, names or [field.name])
                ),
                "leaf": SQL(leaf),
                "first": f"({start},0)",
                "last": f"({start + _BLOCKS},0)",
            }
            with connection.transaction() as cursor:
                cursor.execute(connection.sql(_PAGE, **parts), binary=True)
                found = cursor.fetchall()
            if found:
                vectors, present = stacked([_decoded(row[1], field) for row in found], field.width)
                yield RawPage(
                    ids=[str(row[0]) for row in found],
                    fields=[dict(zip(names, row[2:], strict=False)) for row in found],
                    vectors=vectors,
                    present=present,
                )


def _width(rows: Callable[..., list[Any]], name: str) -> int:
    """The width of the first vector of a column that does not fix it; 0 if there is none."""
    query = "SELECT vector_dims({column}) FROM {table} WHERE {column} IS NOT NULL LIMIT 1"
    found = rows(query, column=Identifier(name))
    return int(found[0][0]) if found else 0


def _decoded(value: bytes | None, field: VectorField) -> Any:
    """A vector as PostgreSQL sends it in binary."""
    if value is None:
        return None
    if field.datatype == "bit":
        bits = np.unpackbits(np.frombuffer(value, dtype=np.uint8, offset=4))[: int.from_bytes(value[:4], "big")]
        return bits.astype(np.float32)
    return np.frombuffer(value, dtype=">f4" if field.datatype == "float32" else ">f2", offset=4).astype(np.float32)
