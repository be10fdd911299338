"""Batches for tests of sinks, without an engine."""

from __future__ import annotations

import numpy as np

from millpond.ingest import Record, WriteBatch, point_id


def rows(n: int, width: int, start: int = 0, metadata: dict[str, object] | None = None) -> WriteBatch:
    """Rows with random vectors that depend on their numbers alone."""
    values = np.stack([np.random.default_rng(i).standard_normal(width) for i in range(start, start + n)])
    values = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)
    records = [Record(f"r{i}", f"text {i}", {"n": i, **(metadata or {})}) for i in range(start, start + n)]
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors={width: values})
