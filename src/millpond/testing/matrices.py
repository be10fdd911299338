"""Token matrices and their MaxSim, for the tests of late-interaction indexes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from millpond.late_interaction import Hit
from millpond.vectors.ragged import Ragged

FloatArray = npt.NDArray[np.float32]

TEXTS = [
    "The mill stands beside the pond.",
    "A wheel turns when the water falls.",
    "Flour is ground between two stones.",
    "The miller sleeps at night",
    "Ducks swim on the pond in the morning.",
]
QUERY = "Where is the water of the pond?"
AWKWARD_IDS = [
    "docs/a b/../c.txt",
    "C:\\mill\\pond",
    "水車小屋 🌊",
    "caf\u00e9",
    "cafe\u0301",  # the same to the eye, another id
    "A",
    "a",
    "1",
    "01",
    "quote \" and ' and % and _",
    "line\nbreak\ttab",
    " leading and trailing ",
    "[] OR 1 == 1",
    "x" * 1000,
]


def units(rows: npt.NDArray[Any]) -> FloatArray:
    """Rows of length 1; zeros stay zeros."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(norms > 0, norms, 1)).astype(np.float32)


def matrices(count: int, *, width: int = 32, tokens: int | Sequence[int] = 6, seed: int = 0) -> list[FloatArray]:
    """Random matrices ``[tokens, width]`` of rows of length 1."""
    random = np.random.default_rng(seed)
    heights = [tokens] * count if isinstance(tokens, int) else tokens
    return [units(random.standard_normal((height, width))) for height in heights]


def ragged(values: Sequence[npt.NDArray[Any]], width: int = 32) -> Ragged:
    """Matrices one after the other."""
    return Ragged.from_matrices(values, width=width)


def maxsim(query: npt.NDArray[Any], document: npt.NDArray[Any]) -> float:
    """The definition, in float64."""
    similarities = units(query).astype(np.float64) @ units(document).astype(np.float64).T
    return float(similarities.max(axis=1).sum())


def documents_of(ids: Sequence[str], values: Sequence[FloatArray]) -> dict[str, FloatArray]:
    """``{id: matrix}``."""
    return dict(zip(ids, values, strict=True))


def names(count: int) -> list[str]:
    """Ids."""
    return [f"doc-{number}" for number in range(count)]


def found(results: Sequence[Sequence[Hit]]) -> list[list[str]]:
    """The ids of hits."""
    return [[hit.id for hit in hits] for hits in results]


def assert_same_hits(hits: Sequence[Sequence[Hit]], expected: Sequence[Sequence[Hit]]) -> None:
    """The same documents in the same order; float32 products of other shapes may round their scores otherwise."""
    assert [[replace(hit, score=0.0) for hit in row] for row in hits] == [
        [replace(hit, score=0.0) for hit in row] for row in expected
    ]
    for row, same in zip(hits, expected, strict=True):
        assert [hit.score for hit in row] == pytest.approx([hit.score for hit in same], abs=1e-5)
