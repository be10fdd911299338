"""Windows: texts longer than the model reads, and the vectors of their parts put together. Pure functions.

Late chunking is the other way round: one long forward, and vectors of the caller's parts of it
(Günther et al., Late Chunking, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import InputTooLongError, InvalidRequestError

FloatArray = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


def windows(ids: Ids, prefix: Ids, suffix: Ids, limit: int) -> list[Ids]:
    """Cut a text's tokens into windows, each with special tokens (and prompt) of its own.

    Every window but the last is full. A short last one does no harm, since vectors are averaged by their tokens, while
    full windows are the fewest, and text added at the end leaves all windows but the last as they were.

    Args:
        ids: int32 ``[tokens]`` of the text alone.
        prefix: int32 put before each window: special tokens, prompt.
        suffix: int32 put behind each.
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
    """``[d]`` mean of ``rows [w, d]``, each weighing as much as its tokens of text, ``counts [w]``.

    Summed in float64. It is shorter than its rows, where these are normalized: normalize it again.
    """
    weights = np.asarray(counts, dtype=np.float64)  # [w]
    if not weights.any():  # windows of nothing but special tokens
        weights = np.ones(len(rows))
    mean: FloatArray = (weights @ rows.astype(np.float64) / weights.sum()).astype(np.float32)
    return mean


def span_rows(
    matrix: FloatArray,
    offsets: npt.NDArray[np.int32],
    special: npt.NDArray[np.bool_],
    spans: Sequence[tuple[int, int]],
    *,
    index: int | None = None,
) -> FloatArray:
    """Mean rows of the tokens that overlap each character span.

    A token that reaches over a span's edge counts on both sides. One that covers no character, as some tokenizers have
    for whitespace, counts where it stands.

    Args:
        matrix: float32 ``[tokens, d]``.
        offsets: int32 ``[tokens, 2]`` each token's characters (code points), half open.
        special: bool ``[tokens]`` tokens that stand for no text.
        spans: ``(start, end)`` half open, in any order; they may overlap.
        index: The text's place in the caller's list, for errors.

    Returns:
        float32 ``[spans, d]``, summed in float64, not normalized.

    Raises:
        InvalidRequestError: A span has no token.
    """
    starts = offsets[:, 0]
    stops = np.maximum(offsets[:, 1], starts + 1)  # an empty token is taken for the character it stands before
    rows = np.empty((len(spans), matrix.shape[1]), dtype=np.float32)
    for i, (start, end) in enumerate(spans):
        found = np.flatnonzero((starts < end) & (stops > start) & ~special)
        if not len(found):
            raise InvalidRequestError(_nothing_there(i, (start, end), offsets[~special], index))
        rows[i] = matrix[found].mean(axis=0, dtype=np.float64)
    return rows


def _nothing_there(i: int, span: tuple[int, int], offsets: npt.NDArray[np.int32], index: int | None) -> str:
    """Why a span has no token: it lies where the text was cut off, or holds whitespace only."""
    whose = "" if index is None else f" of the text at index {index}"
    if len(offsets) == 0:
        return f"span {i}, {span},{whose} has no token, and neither has the text; leave it out"
    first, last = int(offsets[:, 0].min()), int(offsets[:, 1].max())
    return (
        f"span {i}, {span},{whose} has no token: it holds whitespace only, or was cut off (tokens were read for the "
        f"characters {first} to {last}); leave it out, raise max_length, or pass the text in parts"
    )
