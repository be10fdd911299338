"""Little waiting work makes one batch, whoever it belongs to."""

import numpy as np
import pytest

from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.pooling.pooler import OutputSpec

PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=4)


def a_call(lengths, left=None):
    texts = [str(i) for i in range(len(lengths))]
    call = Call(
        texts,
        PLAN,
        assemble=assemble,
        refill=lambda call, queued: None if left is None else left.append(queued),
        native_width=4,
    )
    return call, [Request(call=call, slot=i, ids=np.zeros(n, dtype=np.int32)) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_what_is_too_little_to_be_divided_is_one_batch_of_all_calls(lanes):
    scheduler, left = Scheduler(4096), []
    for _ in range(20):
        scheduler.put(*a_call([5, 7], left))
    batch = scheduler.pick(lanes)
    assert len(batch) == 40 and left == [0] * 20
    assert scheduler.empty and scheduler.tokens == 0 and scheduler.pick(lanes) == []


def test_calls_that_are_over_are_left_out():
    scheduler = Scheduler(4096)
    calls = [a_call([10]) for _ in range(3)]
    for call, requests in calls:
        scheduler.put(call, requests)
    calls[1][0].future.cancel()
    assert scheduler.pick() == [*calls[0][1], *calls[2][1]]
    assert scheduler.tokens == 0


def test_several_calls_are_queued_at_once_and_more_of_a_call_later():
    scheduler = Scheduler(4096)
    first, second = a_call([10, 20]), a_call([30])
    scheduler.put_all([(first[0], first[1][:1]), second])
    scheduler.put(first[0], first[1][1:])
    assert scheduler.tokens == 60
    assert scheduler.pick() == [*first[1], *second[1]]
