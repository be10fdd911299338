"""Comparison of millpond's vectors with reference vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.tiny import TEXTS

from millpond import Engine

TOLERANCE = 1e-5  # relative to the largest value of a vector
VISIBLE = 1e-3  # a mistake must change a vector by more than this


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference over all vectors, relative to the largest value of the vector."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype == np.float32
    return float((np.abs(actual - expected).max(1) / np.abs(expected).max(1)).max())


def assert_equal(actual: np.ndarray, expected: np.ndarray) -> None:
    worst = difference(actual, expected)
    assert worst <= TOLERANCE


def assert_same_vectors(loaded: tuple[Engine, Any], texts: Sequence[str] = TEXTS) -> None:
    """Engine and reference give the same vectors, with ``spec.dimensions`` columns."""
    engine, reference = loaded
    expected = reference.encode(list(texts))
    assert_equal(engine.embed(texts).embeddings, expected)
    assert engine.spec.dimensions == expected.shape[1]
