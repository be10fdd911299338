"""``parametrize`` over several axes with so few rows that each pair of values occurs, in place of every combination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """The rows for axes of values; an axis may name its values, as ids. Always the same rows in the same order."""
    values = [list(axis.values()) if isinstance(axis, Mapping) else list(axis) for axis in axes.values()]
    labels = [list(axis) if isinstance(axis, Mapping) else list(map(str, axis)) for axis in axes.values()]
    rows = _rows([len(axis) for axis in values])
    chosen = [tuple(axis[i] for axis, i in zip(values, row, strict=True)) for row in rows]
    ids = ["-".join(axis[i] for axis, i in zip(labels, row, strict=True)) for row in rows]
    names = list(axes)
    return pytest.mark.parametrize(names, chosen if len(names) > 1 else [one for (one,) in chosen], ids=ids)


def _rows(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Greedy: each row begins with a pair that no row has yet, and takes the values that add the most new pairs."""
    if len(sizes) == 1:
        return [(i,) for i in range(sizes[0])]
    open_pairs = {
        (a, i, b, j): None
        for a, b in combinations(range(len(sizes)), 2)
        for i, j in product(range(sizes[a]), range(sizes[b]))
    }
    rows = []
    while open_pairs:
        a, i, b, j = next(iter(open_pairs))
        row = {a: i, b: j}
        for axis in range(len(sizes)):
            if axis not in row:
                row[axis] = max(
                    range(sizes[axis]),
                    key=lambda value: (sum(pair in open_pairs for pair in _pairs(axis, value, row)), -value),
                )
        rows.append(tuple(row[axis] for axis in range(len(sizes))))
        for c, d in combinations(range(len(sizes)), 2):
            open_pairs.pop((c, row[c], d, row[d]), None)
    return rows


def _pairs(axis: int, value: int, row: Mapping[int, int]) -> list[tuple[int, int, int, int]]:
    return [
        (axis, value, other, given) if axis < other else (other, given, axis, value) for other, given in row.items()
    ]
