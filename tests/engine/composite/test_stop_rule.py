"""The stop rule of a reranking: its distribution, and how often it is wrong where its assumptions hold."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.engine.composite import stop_rule, timed_ranking
from millpond.engine.composite.stop_rule import chance_of_change
from millpond.engine.composite.time_model import TimeModel
from millpond.engine.composite.timed_ranking import TimeBudget, TimedRanking
from millpond.values.inputs import Pair
from millpond.values.outputs import RerankOutput, ScoreOutput, Usage


def rank(scores: np.ndarray, expected: np.ndarray, top_n: int) -> RerankOutput:
    """A ranking that has all the time it wants, by a clock that stands still."""
    budget = TimeBudget.of(1000, documents=len(scores), top_n=top_n, first_scores=expected, begun=0.0)
    ranking = TimedRanking(
        [Pair("", "")] * len(scores), budget, TimeModel(), limit=8, method="maxsim", clock=lambda: 0.0
    )
    while ranking.goes_on() and (part := ranking.next_part()):
        cut, usage = np.zeros(len(part), np.bool_), Usage(prompt_tokens=0)
        ranking.took(ScoreOutput(scores=scores[part], method="maxsim", truncated=cut, usage=usage))
    return ranking.output()


def outcomes(correlation: float, top_n: int, calls: int = 400) -> tuple[int, int, float]:
    """Of calls over 100 documents: how many stopped early, how many of these were wrong, and the mean pairs scored."""
    random = np.random.default_rng(7)
    stopped = wrong = pairs = 0
    for _ in range(calls):
        expected = np.sort(random.standard_normal(100))[::-1]
        noise = random.standard_normal(100) * np.sqrt(1 - correlation**2)
        scores = (correlation * expected + noise).astype(np.float32)
        output = rank(scores, expected, top_n)
        pairs += int(output.scored.sum())
        if output.stopped == "certain":
            stopped += 1
            wrong += {each.index for each in output} != set(np.argsort(-scores)[:top_n].tolist())
    return stopped, wrong, pairs / calls


@pytest.mark.parametrize(("degrees", "quantile", "tail"), [(18, 3.922, 5e-4), (6, 3.707, 5e-3), (10, 2.764, 0.01)])
def test_the_tail_is_that_of_published_tables(degrees: int, quantile: float, tail: float):
    assert stop_rule._upper_tail(quantile, degrees) == pytest.approx(tail, rel=0.025)
    assert stop_rule._upper_tail(-quantile, degrees) == pytest.approx(1 - tail, rel=1e-3)


@pytest.mark.parametrize(("correlation", "top_n", "most_pairs"), [(0.95, 1, 30), (0.95, 10, 75), (0.85, 3, 75)])
def test_it_saves_pairs_and_is_wrong_in_one_of_a_hundred_stops(correlation: float, top_n: int, most_pairs: int):
    stopped, wrong, pairs = outcomes(correlation, top_n)
    assert stopped > 200 and pairs < most_pairs
    assert wrong <= 0.01 * stopped + 2 * np.sqrt(0.01 * stopped)


def test_a_rule_that_stops_too_early_is_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timed_ranking, "_CHANCE", 0.5)
    stopped, wrong, _ = outcomes(0.85, 3)
    assert wrong > 0.01 * stopped + 2 * np.sqrt(0.01 * stopped)


def test_without_a_relation_nearly_everything_is_scored():
    stopped, _, pairs = outcomes(0.0, 10, calls=50)
    assert stopped <= 2 and pairs > 97


def test_few_scores_tell_nothing():
    line = np.arange(20, dtype=np.float64)[::-1]
    assert chance_of_change(line[:7], line[:7], line[7:], best=1) == 1.0
    assert chance_of_change(line[:8], line[:8], line[8:], best=1) < 1e-6
    assert chance_of_change(line[:8], line[:8], line[8:], best=6) == 1.0


def test_equal_expectations_are_judged_by_the_scores_alone():
    scores = np.array([9.0, *np.linspace(-1, 1, 15)])
    flat = np.zeros(16)
    assert chance_of_change(flat, scores, flat[:5], best=1) < chance_of_change(flat, scores, flat[:5], best=8)
    assert chance_of_change(flat, flat, flat, best=1) > 0.99  # all equal: any other may be as good


def test_a_reversed_relation_is_not_believed():
    """Documents that were expected to be worse than all scored ones are never predicted to be better for it."""
    expected = np.arange(30, dtype=np.float64)[::-1]
    scores = np.concatenate([np.linspace(0, 1, 12), np.zeros(18)])
    falling = chance_of_change(expected[:12], scores[:12], expected[12:], best=1)
    rising = chance_of_change(expected[:12], scores[:12][::-1], expected[12:], best=1)
    assert rising < falling
