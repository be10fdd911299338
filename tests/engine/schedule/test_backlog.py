"""How a call's items are handed out to the tokenizer: which, how many, and when."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from millpond.engine.schedule.backlog import Backlog, TokenizeChunk


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


@pytest.mark.parametrize("per_text", [2, 150], ids=["fewer", "more"])
def test_chunks_follow_the_tokens_that_were_found(per_text):
    """Characters say little of tokens: Chinese has more of these for each, and some texts have long words."""
    budget = 32_768
    chunks = all_of(a_backlog([200] * 200_000, batch_tokens=budget), lambda slot: per_text)
    found = [len(chunk.slots) * per_text for chunk in chunks[1:-1]]
    assert len(found) > 2 and min(found) >= 0.95 * 2 * budget and max(found) <= 1.05 * 2 * budget


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
