"""Windows: a text longer than the model reads, cut into parts, and the mean of the parts' vectors. Pure functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import InputTooLongError

FloatArray = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


def windows(ids: Ids, prefix: Ids, suffix: Ids, limit: int) -> list[Ids]:
    """Cut a text's tokens into windows, each with its own special tokens (and prompt).

    Every window but the last is full. A short last window does no harm, since vectors are weighted by their tokens;
    full windows are the fewest, and text added at the end leaves all windows but the last as they were.

    Args:
        ids: int32 ``[tokens]`` of the text alone.
        prefix: int32 put before each window: special tokens, prompt.
        suffix: int32 put after each.
        limit: Most tokens of a window, prefix and suffix included.

    Returns:
        int32 arrays; without prefix and suffix they are ``ids``, in order. A text without tokens has one window.

    Raises:
        InputTooLongError: Prefix and suffix fill the limit.
    """
    room = limit - len(prefix) - len(suffix)
    if room < 1:
        raise InputTooLongError(
            f"prompt and special tokens take {len(prefix) + len(suffix)} of max_length={limit} tokens, which leaves "
            "none for the text; shorten the prompt or raise max_length"
        )
    starts = range(0, max(len(ids), 1), room)
    return [np.concatenate((prefix, ids[start : start + room], suffix)) for start in starts]


def weighted_mean(rows: FloatArray, counts: npt.NDArray[Any]) -> FloatArray:
    """``[d]`` mean of ``rows [windows, d]``, each weighted by its tokens of text, ``counts [windows]``.

    Summed in float64. The mean of normalized rows is shorter than they are: normalize it again.
    """
    weights = np.asarray(counts, dtype=np.float64)  # [windows]
    if not weights.any():  # windows of special tokens only
        weights = np.ones(len(rows))
    mean: FloatArray = (weights @ rows.astype(np.float64) / weights.sum()).astype(np.float32)
    return mean
