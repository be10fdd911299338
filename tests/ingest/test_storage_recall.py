"""benchmarks/storage_recall.py: the simulation finds what Qdrant's engine finds, and the table shows each figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peers.vector_stores import qdrant_edge, uint8
from storage_recall import cuts

from millpond.ingest.advice.quantized import quantize, store
from millpond.ingest.pages.neighbors import nearest, recall


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    random = np.random.default_rng(0)
    rows = random.normal(size=(600, 48)).astype(np.float32) * np.linspace(2, 0.3, 48, dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.contract
def test_qdrant_s_engine_finds_what_the_simulation_finds(rows: np.ndarray, tmp_path: Path) -> None:
    pytest.importorskip("qdrant_edge")
    queries = rows[:20] * 0.9 + rows[20:40] * 0.5
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    cut = cuts(rows, queries)
    found = {stored.layout: stored for stored in qdrant_edge(cut, [16, 48], tmp_path)}
    simulated = {
        f"{width} {datatype}": store(cut(width)[0], datatype).search(cut(width)[1], 10)
        for width in (16, 48)
        for datatype in ("float32", "float16", "uint8")
    }
    simulated |= {f"48 float32 + {copy}": quantize(rows, copy).search(queries, 10) for copy in ("scalar", "binary")}
    for layout, expected in simulated.items():
        # Bits have many equal distances, of which an engine takes any.
        least = 0.8 if "binary" in layout else 0.97
        assert recall(found[layout].found, expected) >= least, layout
    exact = nearest(queries, rows, 10)
    assert recall(found["48 float32 + product, rescored"].found, exact) > recall(
        found["48 float32 + product"].found, exact
    )
    assert recall(found["16 -> 48 float32"].found, exact) > recall(found["16 float32"].found, exact)
    assert found["48 uint8"].bytes < found["48 float16"].bytes < found["48 float32"].bytes


def test_uint8_rows_are_those_of_the_sink(rows: np.ndarray) -> None:
    storage = pytest.importorskip("millpond_qdrant.vector_storage")
    np.testing.assert_array_equal(uint8(rows), storage.StoredVectors(datatype="uint8").encode(rows))
