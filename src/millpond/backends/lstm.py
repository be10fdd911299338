"""An LSTM over texts in numpy on the host; its gates are input, forget, cell and output, as torch has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Linear:
    """``x W + b``."""

    weight: Matrix  # [into, out]
    bias: Matrix  # [out]

    def __call__(self, rows: Matrix) -> Matrix:
        """The product."""
        out: Matrix = rows @ self.weight
        out += self.bias
        return out


@dataclass(frozen=True, kw_only=True)
class Direction:
    """One direction of a layer."""

    into: Linear  # [into, 4 d], the biases of both products added
    back: Matrix  # [d, 4 d]


def read_direction(take: Callable[..., Matrix], prefix: str, suffix: str, *, into: int, width: int) -> Direction:
    """The direction whose tensors are ``<prefix>weight_ih_<suffix>`` and so on; ``take`` checks their shapes."""
    weights = [
        np.ascontiguousarray(take(f"{prefix}weight_{kind}_{suffix}", 4 * width, size).T)
        for kind, size in (("ih", into), ("hh", width))
    ]
    bias = take(f"{prefix}bias_ih_{suffix}", 4 * width) + take(f"{prefix}bias_hh_{suffix}", 4 * width)
    return Direction(into=Linear(weight=weights[0], bias=bias), back=weights[1])


def run_layer(directions: Sequence[Direction], texts: Sequence[Matrix]) -> list[Matrix]:
    """The states of a layer over each text ``[w, d]``: of the first direction, and beside them of the one backwards."""
    sizes = np.array([len(text) for text in texts])
    longest, width, ways = int(sizes.max(initial=0)), len(directions[0].back), len(directions)
    gates = np.zeros((longest, ways, len(texts), 4 * width), dtype=np.float32)
    for way, direction in enumerate(directions):
        for i, text in enumerate(texts):
            gates[: len(text), way, i] = direction.into(text[::-1] if way else text)
    back = np.stack([direction.back for direction in directions])  # [ways, d, 4 d]
    state = cell = np.zeros((ways, len(texts), width), dtype=np.float32)
    states = np.empty((longest, ways, len(texts), width), dtype=np.float32)
    for step in range(longest):
        four = gates[step]
        four += np.matmul(state, back)
        passed, new = _sigmoid(four), np.tanh(four[..., 2 * width : 3 * width])
        cell = passed[..., width : 2 * width] * cell + passed[..., :width] * new
        state = passed[..., 3 * width :] * np.tanh(cell)
        states[step] = state
    return [
        np.concatenate([states[:size, way, i][:: -1 if way else 1] for way in range(ways)], axis=1)
        for i, size in enumerate(sizes)
    ]


def _sigmoid(numbers: Matrix) -> Matrix:
    out: Matrix = 0.5 * np.tanh(0.5 * numbers) + np.float32(0.5)
    return out
