"""Spans: one row for each of a caller's character spans: late chunking (Günther et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from millpond.engine.tokenize.tokenized import TokenAlignment, span_tokens
from millpond.errors import InvalidRequestError

FloatArray = npt.NDArray[np.float32]


def span_rows(
    matrix: FloatArray, alignment: TokenAlignment, spans: Sequence[tuple[int, int]], *, index: int
) -> FloatArray:
    """``[spans, d]`` mean rows of the tokens that overlap each half-open character span, summed in float64.

    A token that reaches over a span's edge counts on both sides. A token without characters, as some tokenizers have
    for whitespace, counts for the character that it stands before. ``index``: of the text in the caller's list.
    """
    rows = np.empty((len(spans), matrix.shape[1]), dtype=np.float32)
    for i, tokens in enumerate(span_tokens(alignment, spans)):
        if not len(tokens):
            message = _no_token_message(i, spans[i], alignment.offsets[~alignment.special], index)
            raise InvalidRequestError(message)
        rows[i] = matrix[tokens].mean(axis=0, dtype=np.float64)
    return rows


def _no_token_message(i: int, span: tuple[int, int], offsets: npt.NDArray[np.int32], index: int) -> str:
    """Why a span has no token: it lies in the truncated part, or contains only whitespace."""
    which = f"span {i}, {span}, of the text at index {index} has no token"
    if len(offsets) == 0:
        return f"{which}, and neither has the text; leave it out"
    return (
        f"{which}: it holds whitespace only, or was cut off (tokens were read for the characters "
        f"{offsets[:, 0].min()} to {offsets[:, 1].max()}); leave it out, raise max_length, or pass the text in parts"
    )
