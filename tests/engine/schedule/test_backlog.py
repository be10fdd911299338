"""How a call's items are handed out to the tokenizer: which, how many, and when."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from millpond.engine.schedule.backlog import CHUNK_TEXTS, Backlog, TokenizeChunk
from millpond.inputs import Pair, TokenIds


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


def test_some_slots_only():
    """Those that were not in the cache."""
    items = ["x" * size for size in range(100)]
    backlog = Backlog(items, [7, 50, 3], limit=512, batch_tokens=4096, feeders=1)
    chunk = backlog.take(0)
    assert chunk is not None and chunk.slots == [3, 7, 50] and backlog.take(0) is None
    assert not backlog.finished
    backlog.done(chunk, 20)
    assert backlog.finished


@pytest.mark.parametrize("characters", [10, 40, 200, 2000], ids=lambda count: f"{count}-characters")
def test_a_chunk_has_the_tokens_of_two_batches(characters):
    """However short the texts are; the first one has those of one batch, since nothing runs before it is there."""
    budget = 32_768
    tokens = min(512, 2 + characters // 4)
    chunks = all_of(a_backlog([characters] * 60_000, batch_tokens=budget), lambda slot: tokens)
    found = [len(chunk.slots) * tokens for chunk in chunks]
    assert len(found) > 3 and min(found[1:-1]) >= 2 * budget and max(found) <= 2 * budget + tokens
    assert 0.8 * budget <= found[0] <= 2 * budget + tokens  # before anything is known of them


def test_short_texts_on_a_small_budget_come_a_thousand_at_a_time():
    """More texts sort better by length, and a batch of a CPU is small."""
    assert [len(chunk.slots) for chunk in all_of(a_backlog([200] * 2500), lambda slot: 50)] == [1024, 1024, 452]


def test_few_long_texts_are_enough_for_a_chunk():
    """The first batch of a CPU does not wait for a thousand long texts."""
    chunks = all_of(a_backlog([4000] * 1000), lambda slot: 512)
    assert {len(chunk.slots) for chunk in chunks[:-1]} == {128}


@pytest.mark.parametrize("per_text", [2, 150], ids=["fewer", "more"])
def test_chunks_follow_the_tokens_that_were_found(per_text):
    """Characters say little of tokens: Chinese has more of these for each, and some texts have long words."""
    budget = 32_768
    chunks = all_of(a_backlog([200] * 200_000, batch_tokens=budget), lambda slot: per_text)
    found = [len(chunk.slots) * per_text for chunk in chunks[1:-1]]
    assert len(found) > 2 and min(found) >= 0.95 * 2 * budget and max(found) <= 1.05 * 2 * budget


def test_a_few_huge_texts_do_not_make_the_first_chunk_short():
    chunk = a_backlog([1_000_000] * 3 + [200] * 5000, batch_tokens=32_768, limit=8192).take(0)
    assert chunk is not None and len(chunk.slots) > 150  # three times the limit, and 8,192 tokens of short ones


@pytest.mark.parametrize(
    ("waiting", "taken"), [(0, True), (511, True), (512, False), (2000, False)], ids=["none", "few", "512", "many"]
)
def test_nothing_is_handed_out_while_enough_texts_wait(waiting, taken):
    """On a small budget 512 texts are enough."""
    backlog = a_backlog([200] * 5000)
    first = backlog.take(0)
    assert first is not None
    backlog.done(first, 50 * len(first.slots))
    assert (backlog.take(waiting) is not None) is taken


@pytest.mark.parametrize("per_text", [5, 52, 192])
def test_the_tokens_of_three_batches_are_enough(per_text):
    budget = 32_768
    backlog = a_backlog([4 * per_text] * 60_000, batch_tokens=budget)
    first = backlog.take(0)
    assert first is not None
    backlog.done(first, per_text * len(first.slots))
    enough = max(512, -(-3 * budget // per_text))
    assert backlog.take(enough) is None
    assert backlog.take(enough - 1) is not None


def test_chunks_in_flight_count_as_waiting():
    backlog = a_backlog([200] * 50_000, batch_tokens=32_768, feeders=8)
    chunks = []
    while (chunk := backlog.take(0)) is not None:
        chunks.append(chunk)
    estimated = sum(chunk.tokens for chunk in chunks)
    assert 3 * 32_768 <= estimated <= 5 * 32_768
    for chunk in chunks:
        backlog.done(chunk, 52 * len(chunk.slots))
    assert backlog.take(sum(len(chunk.slots) for chunk in chunks)) is None


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


def test_at_least_so_many_are_handed_out_if_asked():
    chunk = a_backlog([4000] * 3000).take(0, least=CHUNK_TEXTS)
    assert chunk is not None and len(chunk.slots) == CHUNK_TEXTS
    chunk = a_backlog([4000] * 30).take(0, least=CHUNK_TEXTS)
    assert chunk is not None and len(chunk.slots) == 30


def test_items_of_every_kind_have_a_size():
    items = [TokenIds(ids=(1,) * 50), Pair("a" * 10, "b" * 20), "c"]
    chunk = Backlog(items, range(3), limit=512, batch_tokens=64, feeders=1).take(0)
    assert chunk is not None and chunk.slots[-1] == 0


def test_threads_take_every_slot_once():
    backlog = a_backlog([i % 300 for i in range(40_000)], feeders=8)
    taken: list[list[int]] = []

    def take() -> None:
        while not backlog.finished:
            chunk = backlog.take(0)
            if chunk is not None:
                taken.append(chunk.slots)
                backlog.done(chunk, 50 * len(chunk.slots))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slot for slots in taken for slot in slots) == list(range(40_000))
