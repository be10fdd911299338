"""BoW: a column for each word of the vocabulary, with the weights of the words that a text has."""

from __future__ import annotations

import numpy as np

from millpond.backends.native.heads.kernels import Floats
from millpond.backends.native.heads.pooling import Ints
from millpond.checkpoints.layouts.words import Bag


class BagHead:
    """The weights of a text's words ``[words, 1]`` to its row."""

    def __init__(self, bag: Bag) -> None:
        self._columns, self._counted = len(bag.weights), bag.counted

    def __call__(self, rows: Floats, bounds: Ints, ids: Ints) -> Floats:
        """``[texts, vocabulary]``; the id behind the last word stands for none."""
        out = np.zeros((len(bounds) - 1, self._columns + 1), dtype=np.float32)
        places = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)), ids
        if self._counted:
            np.add.at(out, places, rows[:, 0])
        else:
            out[places] = rows[:, 0]
        return out[:, :-1]
