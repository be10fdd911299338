"""A deadline over a whole call of the client, whatever it sends and repeats inside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")

# Seconds more than the client itself is given, whose own error says more.
_GRACE = 0.5


class DeadlineError(Exception):
    """A call took longer than it may."""


def within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """The result of a call, or DeadlineError.

    pymilvus gives each of its RPCs the whole time: one call may be several (the schema, then the rows; a poll until a
    collection is loaded), and each may be repeated when a server answers that it is unavailable. The call runs in a
    thread of its own, which is left behind when the time is over; it ends with its last RPC.
    """
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="millpond-milvus", daemon=True).start()
    try:
        return answer.result(seconds + _GRACE)
    except TimeoutError:
        if answer.done():  # the call's own error
            raise
        raise DeadlineError(f"no answer within {seconds:g} s") from None
