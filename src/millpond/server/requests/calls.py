"""Calls: an engine's answer awaited by a route, given up when the client leaves or the time is over."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request

from millpond.errors import EngineClosedError, EngineOverloadedError
from millpond.server.errors import ClientGoneError, RequestError
from millpond.server.models import ServedModel
from millpond.server.state import config_of
from millpond.server.telemetry.timings import note
from millpond.vllm_dialect.model import Pending

Output = TypeVar("Output")
Result = TypeVar("Result")

_THREADS = 16
# Calls that wait for one of those threads, or are in one: more would only wait for each other.
_MOST_PREPARING = 1024


class PrepareExecutor:
    """The threads in which calls are checked and queued, apart from those that parse bodies and write answers."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="millpond-desk")
        self._lock = threading.Lock()
        self._preparing = 0

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Start ``work`` in a thread, in the caller's context.

        Raises:
            EngineOverloadedError: Too many others wait for a thread.
        """
        with self._lock:
            if self._preparing >= _MOST_PREPARING:
                raise EngineOverloadedError(
                    f"{self._preparing} requests are being prepared, which is the most; retry in about 1 s",
                    retry_after=1.0,
                )
            self._preparing += 1
        future = self._threads.submit(contextvars.copy_context().run, work)
        future.add_done_callback(self._done)
        return future

    def close(self) -> None:
        """Let the threads end when they have nothing left to do."""
        self._threads.shutdown(wait=False)

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self._preparing -= 1


async def run(
    request: Request, submit: Callable[[], Pending[Output]], *, model: ServedModel | None = None, texts: int = 0
) -> Output:
    """The answer of the call that ``submit`` queues.

    Args:
        request: Whose call it is: its client's leaving cancels it.
        submit: Checks and queues; runs in a thread, since it may tokenize.
        model: Whose call it is; with it a full queue is noticed before a thread is asked for.
        texts: How many texts will be queued.

    Raises:
        EngineOverloadedError: Too many texts are waiting (429).
        RequestError: The time is over (504).
        ClientGoneError: Nobody waits for the answer.
    """
    request.state.texts = texts
    if model is not None:
        model.engine.check_room(texts)
    desk: PrepareExecutor = request.app.state.desk
    async with _while_wanted(request):
        pending = await _taken(desk.submit(submit))
        output = await _result(pending.future)
        if model is not None:
            note(request, model, pending, output)
        if not pending.finished:
            output = await asyncio.to_thread(pending.finish, output)
    usage = getattr(output, "usage", None)
    if usage is not None:
        request.state.tokens = getattr(request.state, "tokens", 0) + usage.prompt_tokens
    return output


async def _result(future: Future[Output]) -> Output:
    """The engine's output; where nobody waits for it any more, what is queued of it is dropped."""
    try:
        return await asyncio.wrap_future(future)  # whose cancellation is the future's
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():  # the engine's own doing
            raise EngineClosedError("the engine was stopped before this request had its turn") from None
        raise


async def _taken(submitted: Future[Pending[Output]]) -> Pending[Output]:
    """What was submitted; where nobody waits for it any more, its work is cancelled as soon as it is known."""
    try:
        return await asyncio.wrap_future(submitted)
    except asyncio.CancelledError:
        submitted.add_done_callback(_cancel)
        raise


def _cancel(submitted: Future[Pending[Any]]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().future.cancel()


@asynccontextmanager
async def _while_wanted(request: Request) -> AsyncIterator[None]:
    """Cancel the body of the block when the client has left, or the time is over."""
    task = asyncio.current_task()
    assert task is not None
    gone = over = False

    def leave(_: Awaitable[None]) -> None:
        nonlocal gone
        if not (over or watch.cancelled()):
            gone = True
            task.cancel()

    watch = asyncio.ensure_future(_disconnection(request))
    watch.add_done_callback(leave)
    try:
        async with asyncio.timeout_at(getattr(request.state, "deadline", None)):
            yield
    except asyncio.CancelledError:
        if gone and not task.uncancel():
            raise ClientGoneError from None
        raise
    except TimeoutError:
        seconds = config_of(request).request_timeout
        raise RequestError(
            f"The answer took more than {seconds:g} s; send fewer or shorter texts", status=504, type="Gateway Timeout"
        ) from None
    finally:
        over = True
        watch.cancel()


async def _disconnection(request: Request) -> None:
    """Over when the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
