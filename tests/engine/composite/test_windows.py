"""Windows over long texts: every token is in one window, and means are weighted by tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millpond.engine.composite.windows import weighted_mean, windows


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


def test_a_mean_weighs_by_tokens():
    rows = np.array([[1, 0], [0, 1], [1, 1]], dtype=np.float32)
    mean = weighted_mean(rows, np.array([6, 3, 1]))
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, [0.7, 0.4], rtol=1e-6)
    assert np.abs(mean - rows.mean(axis=0)).max() > 0.02, "an unweighted mean would have passed"


def test_windows_without_text_weigh_the_same():
    rows = np.array([[1, 0], [0, 1]], dtype=np.float32)
    np.testing.assert_array_equal(weighted_mean(rows, np.array([0, 0])), [0.5, 0.5])


def test_a_mean_is_summed_in_double_precision():
    rows = np.concatenate((np.full((1, 1), 1e8), np.ones((1000, 1)), np.full((1, 1), -1e8))).astype(np.float32)
    np.testing.assert_allclose(weighted_mean(rows, np.ones(1002)), [1000 / 1002], rtol=1e-6)
