"""Pooling methods, in float32: rows of texts, one text behind another, to one row of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from millpond.backends.native.heads.kernels import Floats
from millpond.values.spec import PoolingMode

Ints = npt.NDArray[np.int32]
# rows [tokens, width] and, for each text, its begin, its first pooled row and its end, to [texts, width]
_Method = Callable[[Floats, Ints, Ints, Ints], Floats]


_MEANS = ("mean", "mean_sqrt_len", "weightedmean")
_LEAST = 1e-9  # that sentence-transformers divides by


def pool(
    modes: Sequence[PoolingMode], rows: Floats, bounds: Ints, skip: Ints | None, totals: Floats | None = None
) -> Floats:
    """``[texts, modes width]``: the modes' results side by side.

    Text ``i`` has ``rows[bounds[i]:bounds[i + 1]]``, of which the first ``skip[i]``, a prompt, are left out. A
    mean divides by ``totals [texts]``, if there are any.
    """
    begins, ends = bounds[:-1], bounds[1:]
    firsts = begins if skip is None else begins + skip
    pooled = [
        METHODS[mode](rows, begins, firsts, ends)
        if totals is None or mode not in _MEANS
        else _weighed(mode, rows, begins, firsts, ends, totals)
        for mode in modes
    ]
    return pooled[0] if len(pooled) == 1 else np.concatenate(pooled, axis=1)


def _cls(rows: Floats, begins: Ints, firsts: Ints, ends: Ints) -> Floats:
    return rows[firsts]


def _lasttoken(rows: Floats, begins: Ints, firsts: Ints, ends: Ints) -> Floats:
    return rows[ends - 1]


def _reduced(function: np.ufunc, rows: Floats, firsts: Ints, ends: Ints) -> Floats:
    """``[texts, width]``; row after row, as the kernels and torch add them."""
    out = np.empty((len(firsts), rows.shape[1]), dtype=np.float32)
    for row, first, end in zip(out, firsts.tolist(), ends.tolist(), strict=True):
        function.reduce(rows[first:end], axis=0, out=row)
    return out


def _mean(rows: Floats, begins: Ints, firsts: Ints, ends: Ints) -> Floats:
    sums = _reduced(np.add, rows, firsts, ends)
    sums /= (ends - firsts).astype(np.float32)[:, None]
    return sums


def _mean_sqrt_len(rows: Floats, begins: Ints, firsts: Ints, ends: Ints) -> Floats:
    sums = _reduced(np.add, rows, firsts, ends)
    sums /= np.sqrt((ends - firsts).astype(np.float32))[:, None]
    return sums


def _max(rows: Floats, begins: Ints, firsts: Ints, ends: Ints) -> Floats:
    return _reduced(np.maximum, rows, firsts, ends)


def _weighed(mode: PoolingMode, rows: Floats, begins: Ints, firsts: Ints, ends: Ints, totals: Floats) -> Floats:
    """A mean of rows that have been weighed: the sum of all weights takes the place of the count, as it was weighed."""
    rows = rows * _positions(begins, ends) if mode == "weightedmean" else rows
    divisors: Floats = np.maximum(totals, np.float32(_LEAST))[:, None]
    sums = _reduced(np.add, rows, firsts, ends)
    sums /= np.sqrt(divisors) if mode == "mean_sqrt_len" else divisors
    return sums


def _positions(begins: Ints, ends: Ints) -> Floats:
    """``[tokens, 1]``: 1, 2, 3, ... in each text."""
    return (np.arange(1, ends[-1] + 1) - np.repeat(begins, ends - begins)).astype(np.float32)[:, None]


def _weightedmean(rows: Floats, begins: Ints, firsts: Ints, ends: Ints) -> Floats:
    """Weighted by position (1, 2, 3, ...), as in SGPT; a skipped prompt still counts in the positions."""
    weights = _positions(begins, ends)
    return _reduced(np.add, rows * weights, firsts, ends) / _reduced(np.add, weights, firsts, ends)


METHODS: dict[PoolingMode, _Method] = {
    "cls": _cls,
    "mean": _mean,
    "max": _max,
    "mean_sqrt_len": _mean_sqrt_len,
    "weightedmean": _weightedmean,
    "lasttoken": _lasttoken,
}
