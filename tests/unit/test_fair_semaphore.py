"""Threads get their slots in the order in which they came."""

import os
import signal
import threading

import pytest
from tests.gates import until

from millpond.support.fair_semaphore import FairSemaphore


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


def test_a_search_alone_uses_every_thread():
    turns = FairSemaphore()
    for _ in range(3):
        with turns.turn(4) as share:
            assert share == 4
    assert not turns._line


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


def test_no_more_searches_run_than_there_are_threads():
    turns, order, gate = FairSemaphore(), [], threading.Event()
    threads = [start(turns, 2, number, order, gate) for number in range(5)]
    waiting(turns, 4)
    assert len(order) == 2
    gate.set()
    for thread in threads:
        thread.join(timeout=30)
    assert len(order) == 5 and {share for _, share in order[2:]} == {1}


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


def test_an_error_gives_the_turn_on():
    turns = FairSemaphore()
    with pytest.raises(ValueError, match="broken"), turns.turn(1):
        raise ValueError("broken")
    with turns.turn(1) as share:
        assert share == 1


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
