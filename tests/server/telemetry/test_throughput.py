"""Throughput over the last seconds, with a clock that the test sets."""

from __future__ import annotations

import pytest

from millpond.server.telemetry import throughput
from millpond.server.telemetry.throughput import WINDOW, Throughput


class Hands:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(throughput.time, "monotonic", lambda: self.now)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return Hands(monkeypatch)


def test_nothing_is_nothing(hands: Hands):
    assert Throughput().rate("texts") == 0


def test_a_steady_stream_has_its_rate(hands: Hands):
    done = Throughput()
    for _ in range(400):
        hands.now += 0.1
        done.add(texts=3, tokens=12)
    assert done.rate("texts") == pytest.approx(30, rel=0.05)
    assert done.rate("tokens") == pytest.approx(120, rel=0.05)
    assert done.uptime == pytest.approx(40)


def test_a_server_that_has_just_begun_is_not_called_slow(hands: Hands):
    done = Throughput()
    hands.now += 2
    done.add(texts=20)
    assert done.rate("texts") == 10


def test_the_first_second_is_a_whole_one(hands: Hands):
    done = Throughput()
    hands.now += 0.001
    done.add(texts=5)
    assert done.rate("texts") == 5


def test_what_is_long_ago_is_forgotten(hands: Hands):
    done = Throughput()
    hands.now += 100
    done.add(texts=1000)
    assert done.rate("texts") > 0
    hands.now += WINDOW + 1
    assert done.rate("texts") == 0
    done.add(texts=WINDOW)
    assert done.rate("texts") == pytest.approx(1, rel=0.1)
