"""Rows of any collection, by whomever they were written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from pymilvus import DataType

from millpond.ingest.sinks.raw_rows import RawPage, VectorField, stacked
from millpond_milvus.connection import MilvusConnection

_ROWS = 1000  # of one page
_TYPES = {
    DataType.FLOAT_VECTOR: "float32",
    DataType.FLOAT16_VECTOR: "float16",
    DataType.BFLOAT16_VECTOR: "bfloat16",
    DataType.INT8_VECTOR: "int8",
}


def raw_fields(connection: MilvusConnection) -> list[VectorField]:
    """The dense vectors of a collection."""
    found = connection.call("describe_collection", connection.collection)["fields"]
    return [
        VectorField(
            name=field["name"],
            width=int(field["params"]["dim"]),
            distance=_metric(connection, field["name"]),
            datatype=_TYPES[field["type"]],
        )
        for field in found
        if field["type"] in _TYPES
    ]


def raw_pages(connection: MilvusConnection, field: VectorField) -> Iterator[RawPage]:
    """Pages of rows with all their fields."""
    fields = connection.call("describe_collection", connection.collection)["fields"]
    primary = next(each["name"] for each in fields if each.get("is_primary"))
    vectors = {each["name"] for each in fields if "dim" in (each.get("params") or {})}
    names = [each["name"] for each in fields if each["name"] not in vectors]
    for rows in connection.pages("", [*names, "$meta", field.name], size=_ROWS):
        matrix, present = stacked([_decoded(row.get(field.name), field) for row in rows], field.width)
        yield RawPage(
            ids=[str(row[primary]) for row in rows],
            fields=[{key: value for key, value in row.items() if key not in vectors} for row in rows],
            vectors=matrix,
            present=present,
        )


def _metric(connection: MilvusConnection, name: str) -> str | None:
    """The metric of a field's index, which has the field's name unless somebody chose another."""
    indexes = connection.call("list_indexes", connection.collection, field_name=name)
    found = [connection.call("describe_index", connection.collection, index) for index in indexes]
    return next((str(each["metric_type"]) for each in found if each and "metric_type" in each), None)


def _decoded(value: Any, field: VectorField) -> Any:
    """A vector, which the client returns as bytes if its type is not float32."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], bytes):
        value = value[0]
    if not isinstance(value, bytes):
        return value
    if field.datatype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(value, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(value, dtype=np.int8 if field.datatype == "int8" else np.float16).astype(np.float32)
