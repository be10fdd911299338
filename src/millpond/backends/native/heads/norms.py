"""Norms of rows in float32."""

from __future__ import annotations

import numpy as np

from millpond.backends.native.heads.kernels import Floats

_LEAST_NORM = np.float32(1e-12)  # a row of zeros is left as it is


def layer_norm(rows: Floats, weight: Floats, bias: Floats | None, epsilon: float) -> Floats:  # [n, d] -> [n, d]
    """``(x - mean) / sqrt(variance + epsilon) * weight + bias`` of each row."""
    centered: Floats = rows - rows.mean(-1, keepdims=True)
    variance = np.square(centered).mean(-1, keepdims=True)
    centered /= np.sqrt(variance + np.float32(epsilon))
    centered *= weight
    if bias is not None:
        centered += bias
    return centered


def unit(rows: Floats) -> Floats:  # [n, d] -> [n, d]
    """Each row divided by its L2 norm."""
    norms = np.sqrt(np.square(rows).sum(-1, keepdims=True))
    out: Floats = rows / np.maximum(norms, _LEAST_NORM)
    return out
