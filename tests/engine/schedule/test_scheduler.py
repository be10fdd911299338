"""Which requests are in the next batch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule import scheduler as scheduling
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.pooling.pooler import OutputSpec

PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=4)


def a_call(lengths, refills=None):
    """A call with a request of each length, and those requests."""
    refill = (lambda call, left: refills.append(left)) if refills is not None else (lambda call, left: None)
    texts = [str(i) for i in range(len(lengths))]
    call = Call(texts, PLAN, assemble=assemble, refill=refill, native_width=4)
    return call, [Request(call=call, slot=i, ids=np.zeros(n, dtype=np.int32)) for i, n in enumerate(lengths)]


def schedule(scheduler):
    """The next batch, as a worker takes it; waits for one, and returns None once the scheduler is closed and empty."""
    while scheduler.wait():
        if batch := scheduler.pick():
            return batch
    return None


def tokens(batch):
    return sum(request.length for request in batch)


def test_a_request_over_the_budget_runs_alone():
    scheduler = Scheduler(10)
    call, requests = a_call([50, 3])
    scheduler.put(call, requests)
    assert [request.length for request in schedule(scheduler)] == [50]
    assert [request.length for request in schedule(scheduler)] == [3]


def test_a_late_single_text_is_in_the_next_batch():
    scheduler = Scheduler(100)
    bulk, many = a_call([10] * 1000)
    scheduler.put(bulk, many)
    schedule(scheduler)
    single, one = a_call([5])
    scheduler.put(single, one)
    assert one[0] in schedule(scheduler)


def test_a_long_request_is_not_passed_over_for_ever():
    scheduler = Scheduler(100)
    long, big = a_call([90])
    busy = [a_call([60] * 20) for _ in range(3)]
    for call, requests in busy:
        scheduler.put(call, requests)
    schedule(scheduler)
    scheduler.put(long, big)
    turns = next(i for i in range(10) if big[0] in schedule(scheduler))
    assert turns < 4


def test_a_cancelled_call_is_dropped():
    scheduler = Scheduler(10)
    gone, a = a_call([3] * 5)
    here, b = a_call([3])
    scheduler.put(gone, a)
    scheduler.put(here, b)
    assert gone.future.cancel()
    assert schedule(scheduler) == b


def test_a_call_hears_how_many_requests_are_still_queued():
    refills = []
    scheduler = Scheduler(10)
    call, requests = a_call([5] * 5, refills)
    scheduler.put(call, requests)
    for _ in range(3):
        schedule(scheduler)
    assert refills == [3, 1, 0]


def test_closing_works_the_queue_off_first():
    scheduler = Scheduler(10)
    call, requests = a_call([5])
    scheduler.put(call, requests)
    scheduler.close()
    assert schedule(scheduler) == requests
    assert schedule(scheduler) is None


def test_schedule_waits_for_work():
    scheduler = Scheduler(10)
    got = []
    thread = threading.Thread(target=lambda: got.append(schedule(scheduler)))
    thread.start()
    call, requests = a_call([5])
    scheduler.put(call, requests)
    thread.join(timeout=10)
    assert got == [requests]


def test_shrinking_bounds_later_batches():
    scheduler = Scheduler(100)
    call, requests = a_call([10] * 20)
    scheduler.put(call, requests)
    scheduler.shrink(20)
    assert tokens(schedule(scheduler)) == 20


@given(
    budget=st.integers(1, 200),
    calls=st.lists(st.lists(st.integers(1, 120), min_size=1, max_size=30), min_size=1, max_size=12),
)
def test_everything_is_served_once_within_the_budget(budget, calls):
    scheduler = Scheduler(budget)
    queued = []
    for lengths in calls:
        call, requests = a_call(lengths)
        scheduler.put(call, requests)
        queued += requests
    scheduler.close()
    served = []
    while (batch := schedule(scheduler)) is not None:
        assert tokens(batch) <= budget or len(batch) == 1
        served += batch
    assert len(served) == len(queued) and set(map(id, served)) == set(map(id, queued))


@pytest.mark.parametrize("budget", [16, 64])
def test_no_queue_waits_longer_than_a_round(budget):
    """With c queues, each is served within c batches, whatever the others hold."""
    scheduler = Scheduler(budget)
    calls = [a_call([budget] * 30) for _ in range(5)] + [a_call([budget // 2] * 30)]
    for call, requests in calls:
        scheduler.put(call, requests)
    seen = set()
    for _ in range(len(calls)):
        seen |= {request.call for request in schedule(scheduler)}
    assert seen == {call for call, _ in calls}


def test_short_texts_do_not_share_a_batch_with_a_long_one():
    """A batch takes as long as everything in it, so short calls go first, although the long one came before them."""
    scheduler = Scheduler(4096)
    long, one = a_call([8000])
    scheduler.put(long, one)
    shorts = [a_call([10]) for _ in range(5)]
    for call, requests in shorts:
        scheduler.put(call, requests)
    assert [sorted(request.length for request in schedule(scheduler)) for _ in range(2)] == [[10] * 5, [8000]]


def test_batches_of_long_texts_are_small_for_a_while_after_short_ones_came():
    """A short text waits only for the batch that runs when it arrives."""
    scheduler = Scheduler(4096)
    bulk, many = a_call([500] * 1000)
    scheduler.put(bulk, many)
    assert tokens(schedule(scheduler)) == 4000
    scheduler.put(*a_call([10]))
    sizes = [tokens(schedule(scheduler)) for _ in range(60)]
    assert sizes[0] == 10
    assert set(sizes[1:30]) == {1000} and set(sizes[40:]) == {4000}


def test_two_bulk_calls_have_full_batches_until_they_end():
    """The last texts of a bulk call are few, but the call stays heavy."""
    scheduler = Scheduler(4096)
    for count in (26, 50):
        scheduler.put(*a_call([400] * count))
    assert min(tokens(schedule(scheduler)) for _ in range(8)) >= 3200  # of 30,400: nearly equal parts
    assert scheduler.empty


def test_short_texts_that_keep_coming_leave_long_ones_every_second_batch():
    scheduler = Scheduler(4096)
    bulk, many = a_call([2000] * 8)
    scheduler.put(bulk, many)
    kinds = []
    for _ in range(8):
        scheduler.put(*a_call([10]))
        kinds.append(any(request.call is bulk for request in schedule(scheduler)))
    assert kinds == [False, True] * 4


def test_deferred_calls_are_prepared_together_when_a_batch_is_picked():
    prepared = []

    def prepare(calls):
        prepared.append(list(calls))
        for call in calls:
            scheduler.put(call, requests[call])

    scheduler = Scheduler(100, prepare=prepare)
    requests = dict(a_call([10]) for _ in range(3))
    for call in requests:
        scheduler.defer(call)
    assert not scheduler.empty
    assert (
        scheduler.pick(prepare=False) == [] and not prepared
    )  # a thread that may be interrupted does not tokenize for others
    assert len(scheduler.pick()) == 3 and prepared == [list(requests)]
    assert scheduler.empty


def test_a_deferred_call_wakes_a_worker():
    call, requests = a_call([10])
    scheduler = Scheduler(100, prepare=lambda calls: scheduler.put(calls[0], requests))
    got = []
    thread = threading.Thread(target=lambda: got.append(schedule(scheduler)))
    thread.start()
    scheduler.defer(call)
    thread.join(timeout=60)
    assert got == [requests]


class Clock:
    """A clock that a test sets, for the speed of slots."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(scheduling, "time", clock)
    return clock


def test_two_lanes_finish_together(clock):
    """With three batches, one lane would run two while the other has nothing."""
    scheduler = Scheduler(4096)
    scheduler.put(*a_call([100] * 120))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        sizes = [tokens(one.submit(scheduler.pick, 2).result()), tokens(other.submit(scheduler.pick, 1).result())]
        clock.now += 0.01
        for lane in (one, other):
            lane.submit(scheduler.done).result()
            sizes.append(tokens(lane.submit(scheduler.pick, 1).result()))
    assert sizes == [3000, 3000, 3000, 3000]
    assert scheduler.empty


def test_a_lane_that_is_late_leaves_the_rest_to_the_others(clock):
    scheduler = Scheduler(4096)
    scheduler.put(*a_call([100] * 60))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        assert tokens(one.submit(scheduler.pick, 2).result()) == 3000
        assert tokens(other.submit(scheduler.pick, 1).result()) == 3000
        scheduler.put(*a_call([100] * 20))
        clock.now += 1
        one.submit(scheduler.done).result()  # 3,000 tokens a second
        scheduler.put(*a_call([100] * 20))
        assert tokens(one.submit(scheduler.pick, 1).result()) == 2000  # the other lane is about to be free
