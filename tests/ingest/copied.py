"""Collections of every database that can be opened here, and what the tests of copies compare of them."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.ingest import Record, WriteBatch, open_sink, point_id
from millpond.ingest.sinks.database import installed

DATABASES = {
    "qdrant": "qdrant+path:{}/q#docs",
    "milvus": "milvus+file:{}/m.db#docs",
    "lancedb": "lancedb+path:{}/l#docs",
    "chroma": "chroma+path:{}/c#docs",
}
NAMES = [name for name in (*DATABASES, "pgvector") if name != "chroma" or name in installed()]  # it is a door's


def address(request, name, folder):
    """The URL of an empty collection of a database; skips the test where there is none."""
    pytest.importorskip(f"millpond_{name}")
    if name == "pgvector":
        return f"pgvector+{request.getfixturevalue('postgres').schema()}#docs"
    return DATABASES[name].format(folder)


def fill(url, count, *, widths=(64, 384), spec=None, **options):
    """Write records with random vectors of length 1, which need no model but a spec."""
    chance = np.random.default_rng(0)
    sink = open_sink(url, dimensions=list(widths), **options)
    sink.prepare(spec)
    for start in range(0, count, 1000):
        records = [
            Record(f"r{n}", f"text {n} " + "stone " * (n % 7), {"n": n, "even": n % 2 == 0, "tags": ["a", str(n % 3)]})
            for n in range(start, min(start + 1000, count))
        ]
        vectors = {width: unit(chance.standard_normal((len(records), width))) for width in widths}
        sink.write(WriteBatch(records=records, ids=[point_id(each.id) for each in records], vectors=vectors))
    return sink


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def content(sink, widths=(64, 384)):
    """``{row id: (record id, text, metadata, content hash)}``, and vectors of each width in the order of the ids."""
    rows = sink.read_rows([row_id for row_id, _ in sink.scan()], widths=widths)
    ids = sorted(rows)
    texts = {
        row_id: (rows[row_id].record_id, rows[row_id].text, dict(rows[row_id].metadata), rows[row_id].content_hash)
        for row_id in ids
    }
    return texts, {width: np.stack([rows[row_id].vectors[width] for row_id in ids]) for width in widths}


def same(one, other, *, atol=1e-6):
    """Two collections hold the same rows."""
    (texts, vectors), (texts_too, vectors_too) = content(one), content(other)
    assert texts == texts_too
    for width, rows in vectors.items():
        np.testing.assert_allclose(rows, vectors_too[width], rtol=0, atol=atol)
