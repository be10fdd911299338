"""BGE-M3's token weights and its vectors for late interaction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millpond.backends.native.heads.kernels import Floats, Linear
from millpond.backends.native.heads.pooling import Ints
from millpond.checkpoints.layouts.sparse import TokenVectors, TokenWeights
from millpond.checkpoints.weights import stored_file
from millpond.errors import WeightMismatchError


class TokenWeightHead:
    """``relu(linear(hidden))``; a repeated token has the largest."""

    weights = 0  # numbers that every token is multiplied with: too few to count

    def __init__(self, description: TokenWeights, *, width: int) -> None:
        """Read the layer; ``width`` is the backbone's. Raises WeightMismatchError if it does not fit."""
        self._linear = _linear(description.path, width)
        if self._linear.out_features != 1:
            count = self._linear.out_features
            raise WeightMismatchError(f"{description.path} gives {count} numbers a token; it must give 1")
        self._unused = np.array(description.unused, dtype=np.int32)

    def read(self, hidden: Floats, bounds: Ints, ids: Ints, threads: int) -> Sequence[Floats]:
        """Of each text ``[k, 2]``: its tokens with a positive weight, ascending, and the weights."""
        weights = np.maximum(self._linear(hidden, threads)[:, 0], np.float32(0))
        used = (weights > 0) & ~np.isin(ids, self._unused)
        texts = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        # Text and token id as one number: equal pairs become one entry, in ascending order.
        span = int(ids.max()) + 1
        entries, slots = np.unique(texts[used] * span + ids[used], return_inverse=True)
        largest = np.zeros(len(entries), dtype=np.float32)
        np.maximum.at(largest, slots, weights[used])
        pairs = np.stack(((entries % span).astype(np.float32), largest), axis=1)
        return np.split(pairs, np.searchsorted(entries // span, np.arange(1, len(bounds) - 1)))


def read_token_vectors(description: TokenVectors, *, width: int) -> Linear:
    """The projection ``[tokens, width]`` to ``[tokens, out]``; raises WeightMismatchError if it does not fit."""
    return _linear(description.path, width)


def _linear(path: Path, width: int) -> Linear:
    tensors = stored_file(path)
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or len(weight.shape) != 2 or weight.shape[1] != width:
        problem = "missing" if weight is None else f"of shape {weight.shape}"
        raise WeightMismatchError(f"{path}: weight is {problem}; the backbone's states are {width} wide")
    shapes = {name: tensor.shape for name, tensor in tensors.items() if name != "weight"}
    if shapes not in ({}, {"bias": weight.shape[:1]}):
        raise WeightMismatchError(f"{path} does not hold a linear layer, but also {shapes}")
    return Linear(weight, bias)
