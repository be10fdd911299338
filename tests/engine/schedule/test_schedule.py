"""How a call's texts become batches: handed out to the tokenizer, queued, and picked."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import SENTENCES

from millpond import Engine, PoolingParams
from millpond.backends.backend import OutputSpec
from millpond.engine import dispatcher
from millpond.engine.execute.runner import Runner
from millpond.engine.input.encode import InputEncoder
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule import scheduler as scheduling
from millpond.engine.schedule.backlog import Backlog, TokenizeChunk
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.errors import InputTooLongError


def a_backlog(sizes: list[int], *, batch_tokens: int = 4096, feeders: int = 1, limit: int = 512) -> Backlog:
    """A backlog of texts of so many characters."""
    items = ["x" * size for size in sizes]
    return Backlog(items, range(len(items)), limit=limit, batch_tokens=batch_tokens, feeders=feeders)


def all_of(backlog: Backlog, tokens_of: Callable[[int], int]) -> list[TokenizeChunk]:
    """The chunks, taken one after the other while nothing waits; ``tokens_of``: a slot's tokens."""
    chunks = []
    while (chunk := backlog.take(0)) is not None:
        chunks.append(chunk)
        backlog.done(chunk, sum(map(tokens_of, chunk.slots)))
    return chunks


@pytest.mark.parametrize("feeders", [1, 3])
@pytest.mark.parametrize("count", [1, 17, 1023, 1025, 5000])
def test_every_slot_is_handed_out_once_and_longer_ones_sooner(count, feeders):
    chance = random.Random(count)
    sizes = [chance.randint(0, 3000) for _ in range(count)]
    backlog = a_backlog(sizes, feeders=feeders)
    chunks = all_of(backlog, lambda slot: 1 + sizes[slot] // 5)
    slots = [slot for chunk in chunks for slot in reversed(chunk.slots)]
    assert sorted(slots) == list(range(count)) and backlog.finished
    assert [sizes[slot] for slot in slots] == sorted(sizes, reverse=True)


@pytest.mark.parametrize("characters", [10, 40, 200, 2000], ids=lambda count: f"{count}-characters")
def test_a_chunk_has_the_tokens_of_two_batches(characters):
    """However short the texts are; the first one has those of one batch, since nothing runs before it is there."""
    budget = 32_768
    tokens = min(512, 2 + characters // 4)
    chunks = all_of(a_backlog([characters] * 60_000, batch_tokens=budget), lambda slot: tokens)
    found = [len(chunk.slots) * tokens for chunk in chunks]
    assert len(found) > 3 and min(found[1:-1]) >= 2 * budget and max(found) <= 2 * budget + tokens
    assert 0.8 * budget <= found[0] <= 2 * budget + tokens  # before anything is known of them


@pytest.mark.parametrize("per_text", [2, 400], ids=["fewer", "more"])
def test_chunks_that_are_in_flight_at_once_correct_the_estimate_once(per_text):
    """Each found the same mistake of it; the next ones would be a hundred times too large, or too small."""
    budget = 32_768
    backlog = a_backlog([400] * 800_000, batch_tokens=budget, feeders=6)
    for least, most in ((0.0, 1000.0), (0.9, 1.1), (0.9, 1.1)):
        chunks = []
        while (chunk := backlog.take(0)) is not None:
            chunks.append(chunk)
        assert chunks
        for chunk in chunks:
            assert least * 2 * budget <= per_text * len(chunk.slots) <= most * 2 * budget
        for chunk in chunks:
            backlog.done(chunk, per_text * len(chunk.slots))


def test_no_more_chunks_are_in_flight_than_there_are_feeders():
    backlog = a_backlog([200] * 200_000, batch_tokens=32_768, feeders=2)
    first, second = backlog.take(0), backlog.take(0)
    assert first is not None and second is not None and backlog.take(0) is None
    backlog.done(first, 52 * len(first.slots))
    assert backlog.take(0) is not None


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


def test_a_call_hears_how_many_requests_are_still_queued():
    refills = []
    scheduler = Scheduler(10)
    call, requests = a_call([5] * 5, refills)
    scheduler.put(call, requests)
    for _ in range(3):
        schedule(scheduler)
    assert refills == [3, 1, 0]


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
    # A thread that may be interrupted does not tokenize for others.
    assert scheduler.pick(prepare=False) == [] and not prepared
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


WORDS = sorted({word for sentence in SENTENCES for word in sentence.split()})


INTAKE_BUDGET = 1024


def short_texts(count: int) -> list[str]:
    """Distinct texts of two to four words."""
    n = len(WORDS)
    texts = [f"{WORDS[i % n]} {WORDS[i // n % n]}" + f" {WORDS[i // n**2]}" * (i >= n**2) for i in range(count)]
    assert len(set(texts)) == count
    return texts


@pytest.fixture
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("bert")


@pytest.fixture
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of threads that tokenize."""
    monkeypatch.setattr(dispatcher, "_intake_threads", lambda replicas: request.param)
    return request.param


@pytest.fixture(params=["cpu", pytest.param("streams", marks=[pytest.mark.contract, pytest.mark.torch])])
def engine(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    if request.param == "streams":
        from tests import recording

        recording.backends_of_engines(monkeypatch)
        monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "0")
    with Engine(folder, device="cpu", dtype="float32", max_batch_tokens=INTAKE_BUDGET) as engine:
        yield engine


class Tokenized:
    """Counts the texts that are tokenized; ``before`` is called first, with the texts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[Sequence[Any]], object] = len) -> None:
        self.texts = 0
        self._lock = threading.Lock()
        encode = InputEncoder.encode

        def counted(encoder: InputEncoder, items: Sequence[Any], *args: Any, **options: Any) -> Any:
            before(items)
            tokenized = encode(encoder, items, *args, **options)
            with self._lock:
                self.texts += len(tokenized)
            return tokenized

        monkeypatch.setattr(InputEncoder, "encode", counted)


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_a_long_call_keeps_only_a_bounded_number_tokenized(threads, engine, monkeypatch):
    tokenized, ahead = Tokenized(monkeypatch), []
    done = 0

    def ran(batch: Any) -> None:
        nonlocal done
        done += batch.texts
        ahead.append(tokenized.texts - done)

    engine.observe(ran)
    texts = short_texts(12_000)
    assert len(engine.embed(texts)) == len(texts) == tokenized.texts
    # Of 4 to 7 tokens each: three batches that wait, the stretch that was begun before, and a batch launched ahead.
    lanes = len(engine._dispatcher.workers)
    assert max(ahead) <= (3 + 2 + 2) * lanes * INTAKE_BUDGET / 4
    assert max(ahead) < len(texts) / 2  # so that the bound says something


@pytest.mark.torch
@pytest.mark.contract
@pytest.mark.parametrize("threads", [1], indirect=True)
def test_no_batch_is_short_of_texts_before_the_last_ones(threads, folder, monkeypatch):
    """Each batch is held until what is tokenized ahead of it is there: then batches are full."""
    from tests import recording

    recording.backends_of_engines(monkeypatch)
    monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "0")
    texts, idle, sizes = short_texts(8000), threading.Event(), []
    start = Runner.start

    def held(runner: Runner, requests: Sequence[Request]) -> Any:
        sizes.append(sum(request.length for request in requests))
        wait_for_intake(engine)
        return start(runner, requests)

    def wait_for_intake(engine: Engine) -> None:
        """Two rounds of the one thread: what it was doing, and what that asked for."""
        for _ in range(2):
            engine._dispatcher.threads.submit(idle.set).result(timeout=60)

    monkeypatch.setattr(Runner, "start", held)
    with Engine(folder, device="cpu", dtype="float32", max_batch_tokens=INTAKE_BUDGET) as engine:
        assert len(engine.embed(texts)) == len(texts)
    assert len(sizes) > 30
    assert min(sizes[:-10]) > 0.99 * INTAKE_BUDGET, sizes  # the last stretch is divided into equal parts


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_several_threads_tokenize_one_call_at_once(threads, folder, monkeypatch):
    """While too few texts wait for batches: two threads wait for each other here."""
    together, reached = threading.Barrier(2), threading.Event()

    def meet(items: Sequence[Any]) -> None:
        if not reached.is_set():
            together.wait(timeout=60)
            reached.set()

    tokenized = Tokenized(monkeypatch, meet)
    texts = short_texts(8000)
    with Engine(folder, device="cpu", dtype="float32", max_batch_tokens=8192) as engine:
        assert len(engine.embed(texts)) == len(texts) == tokenized.texts
    assert reached.is_set()


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_a_call_that_is_cancelled_midway_is_tokenized_no_further(threads, engine, monkeypatch):
    tokenized, ran = Tokenized(monkeypatch), threading.Event()
    texts = short_texts(12_000)
    future = engine.submit("embed", texts)
    engine.observe(lambda batch: ran.set() if future.cancel() else None)
    assert ran.wait(timeout=60)
    assert len(engine.embed(SENTENCES)) == len(SENTENCES)
    assert tokenized.texts < len(texts)


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_an_error_in_the_middle_fails_its_call_and_no_other(threads, engine, monkeypatch):
    texts = short_texts(8000)

    def refuse(items: Sequence[Any]) -> None:
        if texts[5000] in items:
            raise RuntimeError("no such word")

    Tokenized(monkeypatch, refuse)
    bad = engine.submit("embed", texts)
    good = engine.submit("embed", texts[:3000])
    with pytest.raises(RuntimeError, match="no such word"):
        bad.result(timeout=120)
    assert len(good.result(timeout=120)) == 3000


def test_a_text_that_is_too_long_refuses_the_call_before_any_of_it_runs(engine):
    ran = []
    engine.observe(ran.append)
    texts = [*short_texts(5000), " ".join(SENTENCES * 20)]
    with pytest.raises(InputTooLongError, match="index 5000"):
        engine.submit("embed", texts, PoolingParams(truncate="error")).result(timeout=120)
    assert ran == []
