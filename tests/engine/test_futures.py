"""The state of a call's future, which the engine reads without the future's lock."""

import threading
from concurrent.futures import CancelledError

import pytest

from millpond.engine.fork import ProcessFuture


def pending():
    return ProcessFuture()


def running():
    future = ProcessFuture()
    future.set_running_or_notify_cancel()
    return future


def cancelled():
    future = ProcessFuture()
    future.cancel()
    return future


def cancelled_and_told():
    future = cancelled()
    future.set_running_or_notify_cancel()
    return future


def finished():
    future = ProcessFuture()
    future.set_result(None)
    return future


def failed():
    future = ProcessFuture()
    future.set_exception(KeyError("why"))
    return future


@pytest.mark.parametrize("make", [pending, running])
def test_a_future_without_an_outcome_is_not_done(make):
    assert make().done() is False


@pytest.mark.parametrize(
    ("make", "error"), [(cancelled, CancelledError), (cancelled_and_told, CancelledError), (failed, KeyError)]
)
def test_a_future_that_was_cancelled_or_failed_is_done_and_says_why(make, error):
    future = make()
    assert future.done() is True
    assert type(future.failure()) is error


def test_a_future_with_a_result_has_no_failure():
    future = finished()
    assert future.done() is True and future.failure() is None


def test_the_state_is_read_without_the_lock():
    future = finished()
    with future._condition:
        seen = []
        thread = threading.Thread(target=lambda: seen.append((future.done(), future.failure())))
        thread.start()
        thread.join(60)
    assert seen == [(True, None)]
