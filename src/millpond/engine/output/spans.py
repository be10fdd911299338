"""Spans: one row for each of a caller's character spans, from the rows of a text's tokens (late chunking).

One long forward, and vectors of the caller's parts of it (Günther et al., Late Chunking, 2024). Windows over a text
that is longer than the model reads are in ``composite/windows.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError

FloatArray = npt.NDArray[np.float32]


def span_rows(
    matrix: FloatArray,  # float32 `[tokens, d]`
    offsets: npt.NDArray[np.int32],  # int32 `[tokens, 2]` each token's character span (code points), half open
    special: npt.NDArray[np.bool_],  # bool `[tokens]` tokens that stand for no text
    spans: Sequence[tuple[int, int]],  # `(start, end)` half open, in any order; they may overlap
    *,
    index: int | None = None,  # index of the text in the caller's list, for errors
) -> FloatArray:
    """Mean rows of the tokens that overlap each character span.

    A token that reaches over a span's edge counts on both sides. A token without characters, as some tokenizers have
    for whitespace, counts for the character that it stands before.

    Returns:
        float32 ``[spans, d]``, summed in float64, not normalized.
    """
    starts = offsets[:, 0]
    stops = np.maximum(offsets[:, 1], starts + 1)
    rows = np.empty((len(spans), matrix.shape[1]), dtype=np.float32)
    for i, (start, end) in enumerate(spans):
        tokens = np.flatnonzero((starts < end) & (stops > start) & ~special)
        if not len(tokens):
            raise InvalidRequestError(_no_token_message(i, (start, end), offsets[~special], index))
        rows[i] = matrix[tokens].mean(axis=0, dtype=np.float64)
    return rows


def _no_token_message(i: int, span: tuple[int, int], offsets: npt.NDArray[np.int32], index: int | None) -> str:
    """Why a span has no token: it lies in the truncated part, or contains only whitespace."""
    whose = "" if index is None else f" of the text at index {index}"
    if len(offsets) == 0:
        return f"span {i}, {span},{whose} has no token, and neither has the text; leave it out"
    first, last = int(offsets[:, 0].min()), int(offsets[:, 1].max())
    return (
        f"span {i}, {span},{whose} has no token: it holds whitespace only, or was cut off (tokens were read for the "
        f"characters {first} to {last}); leave it out, raise max_length, or pass the text in parts"
    )
