"""Case folding of uncased checkpoints, and character offsets of folded text mapped back to the original."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tokenizers.normalizers import Lowercase

# sentence-transformers folds letter by letter; str.lower() treats a final sigma differently.
_LOWER = Lowercase()


def fold(text: str) -> str:
    """``text`` in lower case."""
    return _LOWER.normalize_str(text)


def unfold_offsets(offsets: npt.NDArray[np.int32], text: str) -> npt.NDArray[np.int32]:
    """Map offsets ``[tokens, 2]`` in the folded text to offsets in ``text``: "İ" folds to two characters."""
    if len(fold(text)) == len(text):
        return offsets
    lengths = [len(fold(letter)) for letter in text]
    origin = np.append(np.repeat(np.arange(len(text)), lengths), len(text))
    starts, stops = offsets[:, 0], offsets[:, 1]
    lasts = np.where(stops > starts, origin[np.maximum(stops - 1, 0)] + 1, origin[starts])
    return np.stack((origin[starts], lasts), axis=1).astype(np.int32)
