"""Widths and cuts of vectors, turns of threads, and properties that are computed once."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gates import until

from millpond.checkpoints.build_spec import matryoshka_family
from millpond.errors import InvalidDimensionsError
from millpond.support.cached_property import cached_property
from millpond.support.fair_semaphore import FairSemaphore
from millpond.vectors import matryoshka


def check(dimensions, **options):
    return matryoshka.check(
        dimensions,
        **{"native": 1024, "trained": True, "declared": None, "model": "Qwen/Qwen3-Embedding-0.6B", **options},
    )


def test_a_checkpoints_own_cut_is_the_default_and_the_native_width_stays_available():
    for options in ({}, {"declared": (64, 128)}, {"trained": False}):
        assert check(None, default=100, **options) == check(100, default=100, **options) == 100
        assert check(1024, default=100, **options) == 1024
    with pytest.raises(InvalidDimensionsError, match="one of 64, 128, 1024"):
        check(100, declared=(64, 128))


def test_the_message_names_value_limit_and_way_out():
    with pytest.raises(InvalidDimensionsError) as caught:
        check(2048, smallest=32)
    assert str(caught.value) == ("dimensions=2048 is more than Qwen/Qwen3-Embedding-0.6B has (1024); choose 32 to 1024")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("bad", [0, -5, True, 3.0, "64", None.__class__, np.array([64, 64])])
def test_an_invalid_width_is_refused(bad):
    with pytest.raises(InvalidDimensionsError):
        check(bad)


@given(st.integers(1, 16), st.integers(1, 20))
def test_a_normalized_cut_is_the_unit_vector_of_the_head(width, count):
    rows = np.random.default_rng(count).normal(size=(count, 16)).astype(np.float32)
    cut = matryoshka.cut(rows, width, normalize=True)
    head = rows[:, :width].astype(np.float64)
    np.testing.assert_allclose(cut, head / np.linalg.norm(head, axis=1, keepdims=True), atol=1e-6)
    assert cut.dtype == np.float32 and cut.flags.c_contiguous
    np.testing.assert_array_equal(matryoshka.cut(rows, width, normalize=False), rows[:, :width])


def test_a_zero_row_stays_zero():
    assert not matryoshka.cut(np.zeros((1, 8), dtype=np.float32), 4, normalize=True).any()


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("Qwen/Qwen3-Embedding-0.6B", 32),
        ("/models/qwen3-embedding-8b", 32),
        ("nomic-ai/nomic-embed-text-v1.5", 64),
        ("Snowflake/snowflake-arctic-embed-l-v2.0", 256),
    ],
)
def test_known_families(name, smallest):
    assert matryoshka_family(name).smallest == smallest


@pytest.mark.parametrize("name", ["nomic-ai/nomic-embed-text-v1", "BAAI/bge-base-en-v1.5", "my-qwen3-embedding-4b"])
def test_other_names_belong_to_no_family(name):
    assert matryoshka_family(name) is None


def waiting(turns, count):
    """Returns when so many searches wait."""
    until(lambda: len(turns._line) > count)


def start(turns, threads, name, order, gate=None):
    def search():
        with turns.turn(threads) as share:
            order.append((name, share))
            if gate is not None:
                gate.wait()

    thread = threading.Thread(target=search, daemon=True)
    thread.start()
    return thread


def test_turns_come_in_the_order_of_arrival():
    turns, order, gate = FairSemaphore(), [], threading.Event()
    threads = [start(turns, 1, "first", order, gate)]
    until(lambda: order)
    for number in range(20):
        threads.append(start(turns, 1, number, order))
        waiting(turns, number + 1)
    gate.set()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert [name for name, _ in order] == ["first", *range(20)]
    assert not turns._line


def test_threads_are_shared_with_those_who_are_here():
    turns, order, gate = FairSemaphore(), [], threading.Event()
    threads = []
    for number in range(4):
        threads.append(start(turns, 4, number, order, gate))
        until(lambda number=number: len(order) > number)
    gate.set()
    for thread in threads:
        thread.join(timeout=30)
    assert [share for _, share in order] == [4, 2, 1, 1]


def test_one_who_stops_waiting_takes_no_turn(monkeypatch):
    turns, order, gate = FairSemaphore(), [], threading.Event()
    first = start(turns, 1, "first", order, gate)
    until(lambda: order)

    def interrupted(condition: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(turns._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt), turns.turn(1):
        pass
    monkeypatch.undo()
    assert len(turns._line) == 1
    second = start(turns, 1, "second", order)
    waiting(turns, 1)
    gate.set()
    first.join(timeout=30)
    second.join(timeout=30)
    assert [name for name, _ in order] == ["first", "second"]


@pytest.mark.contract
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_does_not_wait_for_the_searches_of_its_parent():
    turns, gate, order = FairSemaphore(), threading.Event(), []
    thread = start(turns, 1, "parent", order, gate)
    until(lambda: order)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits
        with turns.turn(1):
            os._exit(7)
    ended = os.waitpid(child, 0)
    gate.set()
    thread.join(timeout=30)
    assert os.waitstatus_to_exitcode(ended[1]) == 7


class Batch:
    """Counts how often its property is computed, which may wait for a barrier."""

    def __init__(self, barrier: threading.Barrier | None = None) -> None:
        self.computed = 0
        self.barrier = barrier

    @cached_property
    def rows(self) -> list[int]:
        """Rows."""
        self.computed += 1
        if self.barrier is not None:
            self.barrier.wait()
        return []


def read_in_two_threads(first: Batch, second: Batch) -> list[list[int]]:
    rows: list[list[int]] = []
    threads = [threading.Thread(target=lambda batch=batch: rows.append(batch.rows)) for batch in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def test_the_value_is_computed_once_and_kept() -> None:
    batch = Batch()
    assert batch.rows is batch.rows
    assert batch.computed == 1
    assert Batch.rows.__doc__ == "Rows."


def test_two_objects_are_computed_at_once() -> None:
    """With a lock of the class, the second one is never begun: the barrier breaks."""
    barrier = threading.Barrier(2, timeout=30)
    first, second = Batch(barrier), Batch(barrier)
    assert len(read_in_two_threads(first, second)) == 2
    assert first.computed == second.computed == 1


def test_threads_that_compute_one_value_at_once_get_the_same_object() -> None:
    batch = Batch(threading.Barrier(2, timeout=30))
    first, second = read_in_two_threads(batch, batch)
    assert first is second
    assert batch.computed == 2
