"""Ragged holds n matrices in one allocation."""

import numpy as np
import pytest

from millpond import Ragged

MATRICES = [np.full((n, 3), n, dtype=np.float32) for n in (2, 0, 5)]


def test_it_gives_back_the_matrices():
    ragged = Ragged.from_matrices(MATRICES, width=3)
    assert len(ragged) == 3 and ragged.lengths.tolist() == [2, 0, 5]
    for stored, original in zip(ragged, MATRICES, strict=True):
        np.testing.assert_array_equal(stored, original)
    np.testing.assert_array_equal(ragged[-1], MATRICES[2])
    assert [matrix.shape for matrix in ragged[:2]] == [(2, 3), (0, 3)]
    assert np.shares_memory(ragged[0], ragged.flat)


def test_a_ragged_without_matrices():
    ragged = Ragged.from_matrices([], width=7)
    assert len(ragged) == 0 and ragged.flat.shape == (0, 7) and list(ragged) == []


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_out_of_range_is_refused(index):
    with pytest.raises(IndexError, match="3 matrices"):
        Ragged.from_matrices(MATRICES, width=3)[index]


@pytest.mark.parametrize(
    ("flat", "offsets"),
    [
        (np.zeros(4), [0, 4]),
        (np.zeros((4, 2)), [0, 3]),
        (np.zeros((4, 2)), [1, 4]),
        (np.zeros((4, 2)), []),
        (np.zeros((4, 2)), [0, 3, 2, 4]),
    ],
)
def test_invalid_offsets_are_refused(flat, offsets):

    with pytest.raises(ValueError, match=r"flat|offsets"):
        Ragged(flat=flat, offsets=np.array(offsets, dtype=np.int64))
