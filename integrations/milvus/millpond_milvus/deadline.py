"""A deadline over a whole call of the client, whatever it sends and repeats inside."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc

Answer = TypeVar("Answer")

# Seconds more than the client itself is given, whose own error says more.
_GRACE = 0.5


_THREAD = "millpond-milvus"
_calls = threading.local()


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

    threading.Thread(target=work, name=_THREAD, daemon=True).start()
    try:
        return answer.result(seconds + _GRACE)
    except TimeoutError:
        if answer.done():  # the call's own error
            raise
        raise DeadlineError(f"no answer within {seconds:g} s") from None


def repeat_once(client: Any) -> None:
    """Let a client repeat a call of :func:`within` once when the server is unavailable, and not for all of its time.

    pymilvus 3 asks its connection about such an error before each of its 75 attempts. The first is repeated at once, by
    a new connection if need be; the next is the caller's, who knows how long to wait. Others' calls are left alone.
    """
    handler = getattr(client, "_handler", None)
    reconnect = getattr(handler, "_on_rpc_error", None)
    if reconnect is None or getattr(reconnect, "repeats_once", False):
        return

    def once(error: Exception) -> Any:
        if isinstance(error, grpc.RpcError) and threading.current_thread().name == _THREAD:
            if getattr(_calls, "repeated", False):  # of this thread, which makes one call
                raise error
            _calls.repeated = True
        return reconnect(error)

    once.repeats_once = True  # type: ignore[attr-defined]
    handler._on_rpc_error = once  # type: ignore[union-attr]


def _not_ours(record: logging.LogRecord) -> bool:
    return record.threadName != _THREAD


# The client logs every error with its traceback, and then raises it; its iterators that Milvus Lite has no time stamps.
for name in (
    "pymilvus.decorators",
    "pymilvus.client.connection_manager",
    "pymilvus.client.iterator.query_iterator",
    "pymilvus.orm.iterator",
):
    logging.getLogger(name).addFilter(_not_ours)
