"""Windows over long texts: every token is in one window, and means are weighted by tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.engine.composite.windows import weighted_mean, windows
from millpond.errors import InputTooLongError


def array(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


TOKENS = st.lists(st.integers(0, 50_000), max_size=60).map(lambda ids: array(*ids))
FEW = st.lists(st.integers(0, 50_000), max_size=4).map(lambda ids: array(*ids))


@given(ids=TOKENS, prefix=FEW, suffix=FEW, room=st.integers(1, 30))
def test_windows_cover_every_token_once(ids: np.ndarray, prefix: np.ndarray, suffix: np.ndarray, room: int):
    limit = room + len(prefix) + len(suffix)
    parts = windows(ids, prefix, suffix, limit)
    own = [part[len(prefix) : len(part) - len(suffix)] for part in parts]
    np.testing.assert_array_equal(np.concatenate(own), ids)
    assert len(parts) == max(1, -(-len(ids) // room))  # the fewest possible
    for part in parts:
        assert part.dtype == np.int32
        assert len(part) <= limit
        np.testing.assert_array_equal(part[: len(prefix)], prefix)
        np.testing.assert_array_equal(part[len(part) - len(suffix) :], suffix)
    assert all(len(part) == room for part in own[:-1])
    assert len(own[-1]) > 0 or len(ids) == 0


@given(ids=TOKENS, more=TOKENS, room=st.integers(1, 30))
def test_text_added_at_the_end_leaves_the_full_windows(ids: np.ndarray, more: np.ndarray, room: int):
    before = windows(ids, array(1), array(2), room + 2)
    after = windows(np.concatenate((ids, more)), array(1), array(2), room + 2)
    for old, new in zip(before[:-1], after, strict=False):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, [[101, 7, 102]]),
        (3, [[101, 7, 0, 1, 2, 102]]),
        (4, [[101, 7, 0, 1, 2, 102], [101, 7, 3, 102]]),
        (7, [[101, 7, 0, 1, 2, 102], [101, 7, 3, 4, 5, 102], [101, 7, 6, 102]]),
    ],
)
def test_windows_by_hand(count: int, expected: list[list[int]]):
    assert [part.tolist() for part in windows(array(*range(count)), array(101, 7), array(102), 6)] == expected


@pytest.mark.parametrize("limit", [0, 2, 3])
def test_a_limit_without_room_is_refused(limit: int):
    with pytest.raises(InputTooLongError, match=rf"take 3 of max_length={limit} tokens.*raise max_length"):
        windows(array(5), array(101, 7), array(102), limit)


def test_a_mean_weighs_by_tokens():
    rows = np.array([[1, 0], [0, 1], [1, 1]], dtype=np.float32)
    mean = weighted_mean(rows, np.array([6, 3, 1]))
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, [0.7, 0.4], rtol=1e-6)
    assert np.abs(mean - rows.mean(axis=0)).max() > 0.02, "an unweighted mean would have passed"


def test_one_window_is_its_own_mean():
    row = np.array([[0.25, -3.0]], dtype=np.float32)
    np.testing.assert_array_equal(weighted_mean(row, np.array([17])), row[0])


def test_windows_without_text_weigh_the_same():
    rows = np.array([[1, 0], [0, 1]], dtype=np.float32)
    np.testing.assert_array_equal(weighted_mean(rows, np.array([0, 0])), [0.5, 0.5])


def test_a_mean_is_summed_in_double_precision():
    rows = np.concatenate((np.full((1, 1), 1e8), np.ones((1000, 1)), np.full((1, 1), -1e8))).astype(np.float32)
    np.testing.assert_allclose(weighted_mean(rows, np.ones(1002)), [1000 / 1002], rtol=1e-6)
