"""Which pairs a budget of time is spent on, what is learnt of the time they take, and whose turn it is."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from millpond.engine.composite.time_model import TimeModel
from millpond.engine.composite.timed_ranking import TimeBudget, TimedRanking
from millpond.engine.composite.turns import Turns
from millpond.errors import InvalidRequestError
from millpond.values.inputs import Pair
from millpond.values.outputs import RerankOutput, ScoreOutput, Usage

PAIRS = [Pair("q", "x" * (4 * 96 - 1)) for _ in range(50)]  # 100 tokens each


class Time:
    """A clock that a test sets, and a model of an engine that takes a millisecond for a token."""

    def __init__(self, *, learnt: bool = True) -> None:
        self.now, self.model = 10.0, TimeModel()
        self.model.woke(0.0)
        if learnt:
            for _ in range(60):
                self.model.took(100, 0.1)

    def ranking(self, milliseconds: float, **options: Any) -> TimedRanking:
        options = {"top_n": None, "begun": self.now, "documents": len(PAIRS)} | options
        budget = TimeBudget.of(milliseconds, **options)
        return TimedRanking(PAIRS, budget, self.model, limit=512, method="cosine", clock=lambda: self.now)

    def run(self, ranking: TimedRanking, *, pace: float = 0.001) -> list[list[int]]:
        """Score a ranking's parts, at ``pace`` seconds for a token; a document's score is its index."""
        parts = []
        while ranking.goes_on() and (part := ranking.next_part()):
            self.now += pace * 100 * len(part)
            parts.append(list(part))
            cut, usage = np.zeros(len(part), np.bool_), Usage(prompt_tokens=100 * len(part))
            scores = np.array(part, dtype=np.float32)
            ranking.took(ScoreOutput(scores=scores, method="maxsim", truncated=cut, usage=usage))
        return parts


def scored(output: RerankOutput) -> list[int]:
    return np.flatnonzero(output.scored).tolist()


def test_a_budget_is_spent_on_the_first_documents_and_kept():
    time = Time()
    ranking = time.ranking(2050)
    parts = time.run(ranking)
    output = ranking.output()
    assert scored(output) == list(range(20)) == [index for part in parts for index in part] and time.now < 12.05
    assert output.stopped == "time" and output.method == "maxsim" and output.usage.prompt_tokens == 2000
    assert output.elapsed_ms == pytest.approx(2000)
    assert [each.index for each in output] == [*range(19, -1, -1), *range(20, 50)]
    assert [each.scored for each in output] == [True] * 20 + [False] * 30
    assert np.isnan([each.relevance_score for each in output][20:]).all()
    assert len(parts[0]) > len(parts[-1])  # less at a time toward the end


def test_scores_of_the_first_stage_decide_the_order():
    time = Time()
    ranking = time.ranking(850, first_scores=[float(i % 7) for i in range(50)])
    time.run(ranking)
    output = ranking.output()
    assert scored(output) == [6, 13, 20, 27, 34, 41, 47, 48] or scored(output) == [5, 6, 13, 20, 27, 34, 41, 48]
    rest = [each.index for each in output if not each.scored]
    assert [i % 7 for i in rest] == sorted((i % 7 for i in rest), reverse=True)


def test_all_are_scored_if_there_is_time():
    time = Time()
    ranking = time.ranking(60_000)
    time.run(ranking)
    output = ranking.output()
    assert (
        output.stopped == "all" and output.scored.all() and [each.index for each in output] == list(range(49, -1, -1))
    )


def test_a_budget_below_one_pair_scores_none_and_is_tried_again_some_day():
    time = Time()
    refused = 0
    while not (ranking := time.ranking(50)).goes_on():
        refused += 1
        output = ranking.output()
        assert output.stopped == "time" and not output.scored.any() and output.method == "cosine"
        assert [each.index for each in output] == list(range(50))
    assert 3 < refused < 20  # of a pace that was twice too slow, a tenth is forgotten each time


def test_a_turn_that_came_late_says_nothing_of_the_pace():
    time = Time()
    ranking = time.ranking(500)
    assert ranking.goes_on()
    time.now += 0.45
    assert ranking.next_part() == [] and not ranking.goes_on()
    assert ranking.output().stopped == "time" and time.model.pace == pytest.approx(0.001)


def test_nobody_knows_the_pace_of_a_new_engine():
    time = Time(learnt=False)
    ranking = time.ranking(10_000)
    parts = time.run(ranking, pace=0.002)
    assert len(parts[0]) == 1 and len(parts[1]) > 5
    assert time.model.pace == pytest.approx(0.002)
    assert len(scored(ranking.output())) > 40


def test_an_engine_that_became_slow_is_noticed_within_the_call():
    time = Time()
    ranking = time.ranking(6000)
    time.run(ranking, pace=0.003)
    assert time.now <= 16.0 and len(scored(ranking.output())) >= 18


def test_a_part_that_was_cut_off_counts_only_as_slow():
    time = Time()
    ranking = time.ranking(1000)
    ranking.next_part()
    time.now += 0.01
    ranking.cut_off()
    assert time.model.pace == pytest.approx(0.001)  # less time than it was to take
    other = time.ranking(1000)
    other.next_part()
    time.now += 30
    other.cut_off()
    assert time.model.pace > 0.005 and not other.goes_on()
    assert not other.output().scored.any()


def test_whoever_shares_an_engine_has_smaller_parts():
    time = Time()
    assert len(time.ranking(4000).next_part()) > len(time.ranking(4000).next_part(waiting=7)) >= 1


def test_the_time_model_keeps_a_margin_of_twice_the_delay():
    model = TimeModel()
    assert model.margin(1.0) == pytest.approx(0.1)
    model.woke(0.004)
    assert model.margin(1.0) == pytest.approx(0.008) and model.margin(0.01) == pytest.approx(0.005)
    for _ in range(3000):
        model.woke(0.0)
    assert model.margin(1.0) < 0.001
    time = Time()
    ranking = time.ranking(1000)
    time.now += 1.02
    ranking.output()
    assert time.model.margin(1.0) == pytest.approx(0.0405, rel=0.02)


def test_turns_go_round():
    turns = Turns()
    first, second, third, fourth = (turns.ask() for _ in range(4))
    assert first.done() and not second.done() and turns.waiting == 3
    assert third.cancel()  # its time was over
    turns.leave(third)
    turns.leave(first)
    assert second.done() and not fourth.done()
    turns.leave(second)
    assert fourth.result(0) is None
    turns.leave(fourth)
    last: Future[None] = turns.ask()
    assert last.done()


@pytest.mark.parametrize("wrong", [0, -5, float("nan"), float("inf"), True, "50"])
def test_a_budget_is_a_positive_number(wrong: Any):
    with pytest.raises(
        InvalidRequestError, match=r"^budget_ms=.* must be a positive, finite number of milliseconds; lea"
    ):
        TimeBudget.of(wrong, documents=3, top_n=None, begun=0.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1.0, 2.0], r"^first_scores has the shape \(2,\) and there are 3 documents; pass one score for each"),
        ([1.0, float("nan"), 2.0], r"^first_scores\[1\]=nan is not finite"),
        (["a", "b", "c"], r"^first_scores=.* must be a list of numbers"),
        ([[1.0], [2.0], [3.0]], r"^first_scores has the shape \(3, 1\)"),
    ],
)
def test_first_scores_are_a_number_for_each_document(wrong: Any, message: str):
    with pytest.raises(InvalidRequestError, match=message):
        TimeBudget.of(10, documents=3, top_n=None, first_scores=wrong, begun=0.0)
