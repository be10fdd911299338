"""Changes of rows that no sink makes: one function for each database, over its own client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from millpond.ingest import open_sink

# What databases refuse or change themselves: Qdrant normalizes vectors that are compared by cosine.
IMPOSSIBLE = {
    "qdrant": {"not a number", "not normalized"},
    "milvus": {"missing"},
    "lancedb": {"not a number"},
    "pgvector": {"not a number"},
}
DATABASES = {"qdrant": "qdrant+path:{}/q", "milvus": "milvus+file:{}/m.db", "lancedb": "lancedb+path:{}/l"}


def edit(url: str, vectors: Mapping[str, np.ndarray | None], texts: Mapping[str, str] | None = None) -> None:
    """Put other vectors, or none, and other texts into rows of a collection that millpond made, by their row ids."""
    kind = url.partition("+")[0]
    with closing(open_sink(url, must_exist=True)) as sink:
        _EDITORS[kind](sink, dict(vectors), dict(texts or {}))


def _edit_qdrant(sink: Any, vectors: dict[str, Any], texts: dict[str, str]) -> None:
    from qdrant_client import models

    (field,) = sink.raw().fields()
    points = [
        models.PointVectors(id=row_id, vector={field.name: row.tolist()})
        for row_id, row in vectors.items()
        if row is not None
    ]
    if points:
        sink.client.update_vectors(sink.collection, points)
    if gone := [row_id for row_id, row in vectors.items() if row is None]:
        sink.client.delete_vectors(sink.collection, vectors=[field.name], points=gone)
    for row_id, text in texts.items():
        sink.client.set_payload(sink.collection, {"text": text}, points=[row_id])


def _edit_milvus(sink: Any, vectors: dict[str, Any], texts: dict[str, str]) -> None:
    sink.open()
    (field,) = sink.raw().fields()
    rows = sink.client.query(
        sink.collection,
        ids=list({*vectors, *texts}),
        output_fields=["id", "text", "metadata", "content_hash", field.name],
    )
    for row in rows:
        row[field.name] = list(map(float, vectors.get(row["pk"], row[field.name])))
        row["text"] = texts.get(row["pk"], row["text"])
    sink.client.insert(sink.collection, [dict(row) for row in rows])


def _edit_lancedb(sink: Any, vectors: dict[str, Any], texts: dict[str, str]) -> None:
    (field,) = sink.raw().fields()
    table = sink.client.open_table(sink.collection)
    for row_id, row in vectors.items():
        table.update(where=f"pk = '{row_id}'", values={field.name: None if row is None else row.tolist()})
    for row_id, text in texts.items():
        table.update(where=f"pk = '{row_id}'", values={"text": text})


def _edit_pgvector(sink: Any, vectors: dict[str, Any], texts: dict[str, str]) -> None:
    (field,) = sink.raw().fields()
    with sink.client.cursor() as cursor:
        for row_id, row in vectors.items():
            value = None if row is None else json.dumps(row.tolist())
            cursor.execute(f"UPDATE docs SET {field.name} = %s::vector WHERE pk = %s", (value, row_id))
        for row_id, text in texts.items():
            cursor.execute("UPDATE docs SET text = %s WHERE pk = %s", (text, row_id))


_EDITORS = {"qdrant": _edit_qdrant, "milvus": _edit_milvus, "lancedb": _edit_lancedb, "pgvector": _edit_pgvector}
