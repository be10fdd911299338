"""CSR's sparse code of a pooled vector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millpond.backends.native.heads.kernels import Floats, Linear
from millpond.checkpoints.layouts.sparse import SparseCode
from millpond.checkpoints.weights import stored_tensors
from millpond.errors import WeightMismatchError

_EPSILON = np.float32(1e-5)  # added to the deviation


class SparseCodeHead:
    """``relu((x - pre_bias) W^T + latent_bias)``."""

    weights = 0  # numbers that every token is multiplied with

    def __init__(self, description: SparseCode, *, width: int) -> None:
        """Read the layer; ``width`` is that of the pooled vectors. Raises WeightMismatchError if it does not fit."""
        tensors = stored_tensors(description.folder)
        found = []
        for names, shape in description.shapes().items():
            name = next((name for name in names if name in tensors), names[0])
            if name not in tensors or tensors[name].shape != shape or width != description.in_features:
                actual = tensors[name].shape if name in tensors else "missing"
                raise WeightMismatchError(
                    f"{description.folder}: {name} is {actual}, not {shape}, and vectors have {width} columns; check "
                    "that the files belong together"
                )
            found.append(tensors[name])
        weight, bias, latent_bias = found
        self._linear, self._bias = Linear(weight, latent_bias), bias.float32()
        self._standardized = description.standardized

    def read(self, pooled: Floats, threads: int) -> Sequence[Floats]:  # [texts, in]
        """Of each text ``[k, 2]``: its positive entries, ascending, and their weights."""
        if self._standardized:
            pooled = pooled - pooled.mean(-1, keepdims=True)
            pooled = pooled / (pooled.std(-1, ddof=1, keepdims=True) + _EPSILON)
        code = self._linear(pooled - self._bias, threads)
        texts, entries = np.nonzero(~(code <= 0))  # NaN is to be noticed
        pairs = np.stack((entries.astype(np.float32), code[texts, entries]), axis=1)
        return np.split(pairs, np.searchsorted(texts, np.arange(1, len(code))))
