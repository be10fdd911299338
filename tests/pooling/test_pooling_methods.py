"""Pooling methods against numbers computed by hand."""

import math

import pytest
import torch

from millpond.attention.segments import Segments
from millpond.pooling.methods import METHODS

#              segment of three rows                      | one row
HIDDEN = torch.tensor([[1.0, -4.0], [3.0, 8.0], [5.0, -1.0], [7.0, -2.0]])
SEGMENTS = Segments.of([3, 1])

GOLDEN = {
    "cls": [[1, -4], [7, -2]],
    "lasttoken": [[5, -1], [7, -2]],
    "mean": [[3, 1], [7, -2]],
    "max": [[5, 8], [7, -2]],
    "mean_sqrt_len": [[9 / math.sqrt(3), 3 / math.sqrt(3)], [7, -2]],
    "weightedmean": [[(1 + 6 + 15) / 6, (-4 + 16 - 3) / 6], [7, -2]],
}
# The first token of the first segment is a prompt that pooling leaves out.
GOLDEN_SKIPPED = {
    "cls": [[3, 8], [7, -2]],
    "lasttoken": [[5, -1], [7, -2]],
    "mean": [[4, 3.5], [7, -2]],
    "max": [[5, 8], [7, -2]],
    "mean_sqrt_len": [[8 / math.sqrt(2), 7 / math.sqrt(2)], [7, -2]],
    "weightedmean": [[(6 + 15) / 5, (16 - 3) / 5], [7, -2]],
}


@pytest.mark.parametrize("mode", METHODS)
def test_golden(mode):
    torch.testing.assert_close(METHODS[mode](HIDDEN, SEGMENTS, None), torch.tensor(GOLDEN[mode], dtype=torch.float32))


@pytest.mark.parametrize("mode", METHODS)
def test_golden_without_the_prompt(mode):
    skip = torch.tensor([1, 0], dtype=torch.int32)
    expected = torch.tensor(GOLDEN_SKIPPED[mode], dtype=torch.float32)
    torch.testing.assert_close(METHODS[mode](HIDDEN, SEGMENTS, skip), expected)


@pytest.mark.parametrize("mode", METHODS)
def test_neighbours_do_not_matter(mode):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 8, generator=generator)
    together = METHODS[mode](rows, Segments.of([11, 1, 28]), None)
    alone = METHODS[mode](rows[11:12], Segments.of([1]), None)
    torch.testing.assert_close(together[1:2], alone)
    last = METHODS[mode](rows[12:], Segments.of([28]), None)
    torch.testing.assert_close(together[2:], last)
