"""Vectors of millpond beside vectors of somebody else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.tiny import TEXTS

from millpond.engine.engine import Engine

TOLERANCE = 1e-5  # of the largest value of a vector
VISIBLE = 1e-3  # what a mistake must move it by at least


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of any vector, as a share of that vector's largest value."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == np.float32
    return float((np.abs(found - expected).max(1) / np.abs(expected).max(1)).max())


def assert_equal(found: np.ndarray, expected: np.ndarray) -> None:
    worst = difference(found, expected)
    assert worst <= TOLERANCE


def assert_same_vectors(loaded: tuple[Engine, Any], texts: Sequence[str] = TEXTS) -> None:
    """Both give the same vectors, of the width that the engine announces."""
    engine, reference = loaded
    expected = reference.encode(list(texts))
    assert_equal(engine.embed(texts).embeddings, expected)
    assert engine.spec.dimensions == expected.shape[1]
