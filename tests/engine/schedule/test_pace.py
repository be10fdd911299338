"""The advice of an overload error counts busy time only."""

import pytest

from millpond.engine import dispatcher


def test_idle_hours_do_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(dispatcher.time, "monotonic", lambda: now)
    pace = dispatcher._Pace()
    pace.begin()
    now += 2
    pace.count(100, idle=True)
    now += 3600
    pace.begin()
    assert pace.seconds(50) == pytest.approx(1.0)
    now += 2  # a slow start of the second stretch shows
    assert pace.seconds(50) == pytest.approx(2.0)


def test_bounds():
    assert dispatcher._Pace().seconds(10**9) == 60.0
    assert dispatcher._Pace().seconds(0) == 0.1
