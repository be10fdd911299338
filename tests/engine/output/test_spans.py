"""Rows of a caller's character spans: means of the tokens that overlap them."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.engine.output.spans import span_rows
from millpond.errors import InvalidRequestError


def flags(*special: int) -> np.ndarray:
    return np.array(special, dtype=np.bool_)


# "Ada met Bob." as [CLS] Ada met Bo ##b . [SEP]
MATRIX = np.array([[100, 100], [1, 0], [2, 0], [4, 8], [8, 0], [16, 0], [100, 100]], dtype=np.float32)
OFFSETS = np.array([[0, 0], [0, 3], [4, 7], [8, 10], [10, 11], [11, 12], [0, 0]], dtype=np.int32)
SPECIAL = flags(1, 0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ((0, 3), [1, 0]),
        ((0, 1), [1, 0]),  # part of a token counts as the token
        ((3, 8), [2, 0]),
        ((0, 7), [1.5, 0]),
        ((8, 11), [6, 4]),
        ((9, 11), [6, 4]),
        ((10, 12), [12, 0]),
        ((0, 12), [6.2, 1.6]),
    ],
)
def test_a_span_is_the_mean_of_its_tokens(span: tuple[int, int], expected: list[float]):
    rows = span_rows(MATRIX, OFFSETS, SPECIAL, [span])
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, [expected], rtol=1e-6)


def test_a_span_is_summed_in_double_precision():
    rows = np.concatenate((np.full((1, 1), 1e8), np.ones((1000, 1)), np.full((1, 1), -1e8))).astype(np.float32)
    offsets = np.stack((np.arange(1002), np.arange(1, 1003)), axis=1).astype(np.int32)
    spanned = span_rows(rows, offsets, np.zeros(1002, dtype=np.bool_), [(0, 1002)])
    np.testing.assert_allclose(spanned, [[1000 / 1002]], rtol=1e-6)


def test_a_token_without_characters_counts_where_it_stands():
    offsets = np.array([[0, 0], [0, 1], [2, 2], [3, 4]], dtype=np.int32)  # "▁", "a", "▁", "b" of "a  b"
    matrix = np.array([[1], [2], [4], [8]], dtype=np.float32)
    rows = span_rows(matrix, offsets, flags(0, 0, 0, 0), [(0, 2), (2, 4), (2, 3), (0, 4)])
    np.testing.assert_allclose(rows[:, 0], [1.5, 6, 4, 3.75])


@pytest.mark.parametrize(
    ("span", "index", "named"),
    [
        ((3, 4), 5, r"span 1, \(3, 4\), of the text at index 5 has no token"),
        ((12, 14), None, r"span 1, \(12, 14\), has no token.*characters 0 to 12.*raise max_length"),
    ],
)
def test_a_span_without_tokens_is_refused(span: tuple[int, int], index: int | None, named: str):
    with pytest.raises(InvalidRequestError, match=named):
        span_rows(MATRIX, OFFSETS, SPECIAL, [(0, 3), span], index=index)


def test_a_text_without_tokens_has_no_spans():
    with pytest.raises(InvalidRequestError, match=r"span 0, \(0, 2\), has no token, and neither has the text"):
        span_rows(MATRIX[:2], OFFSETS[[0, 6]], flags(1, 1), [(0, 2)])
