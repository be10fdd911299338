"""The bounds of the share of rows that are off: their values, and that they hold at every moment at once."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.audit.sequential import ShareBounds


def bounds(off: int, rows: int, *, total: int = 10**6, confidence: float = 0.99) -> ShareBounds:
    return ShareBounds(off=off, rows=rows, total=total, confidence=confidence)


def test_what_is_seen_is_between_the_bounds_which_close_in():
    for off, rows in ((0, 1), (0, 500), (3, 500), (250, 500), (500, 500), (1, 1)):
        known = bounds(off, rows)
        assert 0 <= known.low <= off / rows <= known.high <= 1, (off, rows)
    widths = [
        bounds(share * rows // 10, rows).high - bounds(share * rows // 10, rows).low
        for share in (0, 3)
        for rows in (50, 500, 5000)
    ]
    assert widths[:3] == sorted(widths[:3], reverse=True) and widths[3:] == sorted(widths[3:], reverse=True)
    assert bounds(0, 0).high == 1 and bounds(0, 0).low == 0


def test_a_clean_sample_ends_at_half_a_percent():
    assert not bounds(0, 1472).is_known_to(0.005) and bounds(0, 1536).is_known_to(0.005)
    # No better than if one had planned so many rows: 917 without an error exclude 0.5 % with 99 %.
    assert pytest.approx(0.01, rel=0.02) == 0.995**917
    assert not bounds(1, 1536).is_known_to(0.005)
    assert bounds(0, 1100, confidence=0.95).is_known_to(0.006)


def test_when_every_row_was_seen_the_share_is_exact():
    for off in (0, 7, 20):
        known = bounds(off, 20, total=20)
        assert known.low == known.high == off / 20
    assert bounds(19, 19, total=20).low >= 19 / 20 and bounds(0, 19, total=20).high <= 1 / 20
    assert ShareBounds(off=0, rows=0, total=0, confidence=0.9).high == 0


@pytest.mark.parametrize("share", [0.002, 0.05, 0.4])
def test_the_bounds_hold_at_every_moment(share: float):
    """Of 100 samples, each looked at after every 16 rows, at most a tenth excludes the true share at any time."""
    random = np.random.default_rng(7)
    left = fixed = 0
    for _ in range(100):
        off = np.cumsum(random.random(640) < share)[15::16]
        moments = list(zip(off.tolist(), range(16, 641, 16), strict=True))
        known = [bounds(count, rows, confidence=0.9) for count, rows in moments]
        left += any(not each.low <= share <= each.high for each in known)
        fixed += any(abs(count / rows - share) > 1.645 * (share * (1 - share) / rows) ** 0.5 for count, rows in moments)
    assert left <= 10
    assert fixed > 25  # what a normal interval for one look does
