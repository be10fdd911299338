"""The retry time of an overload error counts busy time only."""

import pytest

from millpond.engine.schedule import admission


def test_idle_hours_do_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(admission.time, "monotonic", lambda: now)
    throughput = admission._Throughput()
    throughput.begin()
    now += 2
    throughput.count(100, idle=True)
    now += 3600
    throughput.begin()
    assert throughput.seconds(50) == pytest.approx(1.0)
    now += 2  # a slow start of the second busy period counts
    assert throughput.seconds(50) == pytest.approx(2.0)


def test_bounds():
    assert admission._Throughput().seconds(10**9) == 60.0
    assert admission._Throughput().seconds(0) == 0.1
