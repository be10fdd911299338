"""Documents for the tests of PlaidIndex: token rows around a few hundred directions, as those of texts are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from millpond.late_interaction import PlaidIndex, Ragged

WIDTH = 24


def matrices(count: int, *, seed: int = 0, width: int = WIDTH, most: int = 30) -> list[npt.NDArray[np.float32]]:
    """Float32 matrices of 1 to ``most`` rows."""
    random = np.random.default_rng(seed)
    topics = np.random.default_rng(99).normal(size=(300, width))
    return [
        (topics[random.integers(300, size=rows)] + 0.4 * random.normal(size=(rows, width))).astype(np.float32)
        for rows in random.integers(1, most + 1, size=count)
    ]


def ragged(some: list[npt.NDArray[np.float32]], width: int = WIDTH) -> Ragged:
    """The matrices as one Ragged."""
    return Ragged.from_matrices(some, width=width)


def names(count: int, prefix: str = "d") -> list[str]:
    """Ids."""
    return [f"{prefix}{index}" for index in range(count)]


def filled(path: Path, count: int, *, codec: str = "4", seed: int = 0) -> PlaidIndex:
    """An index of ``count`` documents with texts and metadata."""
    index = PlaidIndex(path, None, codec)  # type: ignore[arg-type]
    index.add_embeddings(
        names(count),
        ragged(matrices(count, seed=seed)),
        texts=[f"text {number}" for number in range(count)],
        metadata=[{"third": number % 3, "tags": [f"t{number % 5}", "all"]} for number in range(count)],
    )
    return index


def maxsim(query: npt.NDArray[np.float32], document: npt.NDArray[np.float32]) -> float:
    """The definition, in float64."""
    unit = [rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True) for rows in (query, document)]
    return float((unit[0] @ unit[1].T).max(axis=1).sum())
