"""LinearMap: vectors of one model taken to the space of another one, by a matrix that was fitted to rows of both."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearMap:
    """``rows @ matrix + bias``, and what becomes of a cosine that was found by it.

    Attributes:
        matrix: ``[source, target]``.
        bias: ``[target]``.
        scale: By which a cosine in the target space is multiplied, to compare it with one of the source space.
        offset: What is then added.
    """

    matrix: Rows
    bias: Rows
    scale: float = 1.0
    offset: float = 0.0

    @property
    def source(self) -> int:
        """The width of what it takes."""
        return int(self.matrix.shape[0])

    @property
    def target(self) -> int:
        """The width of what it gives."""
        return int(self.matrix.shape[1])

    def apply(self, rows: Rows) -> Rows:  # [n, source] of length 1 -> [n, target]
        """The rows in the target space."""
        mapped: Rows = (rows @ self.matrix + self.bias).astype(np.float32)
        return mapped

    def score(self, cosine: float) -> float:
        """A cosine with rows of the target space, as one with the same rows in the source space would be."""
        return self.scale * cosine + self.offset


@dataclass(frozen=True, kw_only=True, eq=False)
class Bridge:
    """Two maps between the spaces of two models.

    Attributes:
        forward: From the new model's to the old one's.
        back: From the old model's to the new one's.
        recall: Expected recall at ten of questions by ``forward``, as a share of what they find with the new vectors.
        recall_back: The same of ``back``.
    """

    forward: LinearMap
    back: LinearMap
    recall: float
    recall_back: float

    def to_bytes(self) -> bytes:
        """As a file of numpy, without pickles."""
        file = io.BytesIO()
        numbers = [self.recall, self.recall_back]
        arrays: dict[str, Any] = {}
        for name, each in (("forward", self.forward), ("back", self.back)):
            arrays |= {f"{name}_matrix": each.matrix, f"{name}_bias": each.bias}
            numbers += [each.scale, each.offset]
        np.savez(file, numbers=np.array(numbers, np.float64), **arrays)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Bridge:
        """As :meth:`to_bytes` wrote it; raises ValueError or KeyError for anything else."""
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            recall, recall_back, *scores = arrays["numbers"].tolist()
            maps = [
                LinearMap(matrix=arrays[f"{name}_matrix"], bias=arrays[f"{name}_bias"], scale=scale, offset=offset)
                for name, scale, offset in (("forward", *scores[:2]), ("back", *scores[2:]))
            ]
        return cls(forward=maps[0], back=maps[1], recall=recall, recall_back=recall_back)


def procrustes(source: Rows, target: Rows) -> LinearMap:
    """The rotation that takes ``source [n, s]`` nearest to ``target [n, t]``: angles stay, as far as widths allow."""
    left, _, right = np.linalg.svd(source.T.astype(np.float64) @ target, full_matrices=False)
    return LinearMap(matrix=(left @ right).astype(np.float32), bias=np.zeros(target.shape[1], np.float32))


def ridge(source: Rows, target: Rows, weight: float) -> LinearMap:
    """The least squares from ``source [n, s]`` to ``target [n, t]``, with ``weight`` times the mean variance added."""
    mean, goal = source.mean(0, dtype=np.float64), target.mean(0, dtype=np.float64)
    centred = source - mean
    gram = centred.T @ centred
    gram += np.eye(len(gram)) * (weight * np.trace(gram) / len(gram))
    matrix = np.linalg.solve(gram, centred.T @ (target - goal))
    return LinearMap(matrix=matrix.astype(np.float32), bias=(goal - mean @ matrix).astype(np.float32))
