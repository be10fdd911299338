"""Exact nearest neighbours: blocks, ties, and the recall of rows that were cut."""

import numpy as np
import pytest

from millpond.ingest.pages import neighbors
from millpond.ingest.pages.neighbors import nearest, plotted_widths, recall_by_width, top
from millpond.vectors import matryoshka


@pytest.mark.parametrize("k", [1, 10, 99, 100, 500])
@pytest.mark.parametrize("block", [1, 300, 1 << 23], ids=["row by row", "some rows", "one block"])
def test_nearest_equals_a_full_sort_in_any_blocks_and_with_equal_scores(monkeypatch, k, block):
    random = np.random.default_rng(3)
    queries = random.integers(-2, 3, (7, 4)).astype(np.float32)
    rows = random.integers(-2, 3, (100, 4)).astype(np.float32)  # integers: many scores are equal
    monkeypatch.setattr(neighbors, "_BLOCK_SCORES", block)
    expected = np.argsort(-(queries @ rows.T), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(nearest(queries, rows, k), expected)
    np.testing.assert_array_equal(nearest(queries, rows.astype(np.int8), k), expected)


def test_without_rows_nothing_is_near():
    assert nearest(np.ones((3, 2), np.float32), np.ones((0, 2), np.float32), 5).shape == (3, 0)
    assert top(np.ones((0, 4), np.float32), 2).shape == (0, 2)


def test_recall_by_width_is_that_of_a_search_among_the_other_rows():
    random = np.random.default_rng(0)
    rows = random.normal(size=(120, 16)).astype(np.float32)
    values = recall_by_width(rows, [4, 16, 8], k=5)
    assert list(values) == [4, 8, 16] and values[16] == 1.0
    assert values[4] < values[8] < 1.0

    def by_hand(width):
        cut = matryoshka.cut(rows, width, normalize=True)
        scores = cut @ cut.T
        np.fill_diagonal(scores, -np.inf)
        return [set(np.argsort(-row)[:5]) for row in scores]

    shares = [len(a & b) / 5 for a, b in zip(by_hand(8), by_hand(16), strict=True)]
    assert values[8] == pytest.approx(np.mean(shares))


def test_the_widths_of_a_plot_are_the_declared_ones_the_stored_ones_and_the_full_one():
    assert plotted_widths(384, None) == [32, 64, 128, 256, 384]
    assert plotted_widths(1024, (64, 512, 1024), stored=[100, 4096]) == [64, 100, 512, 1024]
    assert plotted_widths(16, None) == [16]
    assert plotted_widths(64, None) == [32, 64]
