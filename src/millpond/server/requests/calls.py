"""Calls: a route awaits the engine's result, and gives up when the client disconnects or the deadline passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request

from millpond.errors import EngineClosedError
from millpond.server.errors import ClientGoneError, RequestError
from millpond.server.models import ServedModel
from millpond.server.state import config_of, prepare_executor_of
from millpond.server.telemetry.timings import record_work
from millpond.vllm_dialect.model import Pending

Output = TypeVar("Output")


async def run(
    request: Request, submit: Callable[[], Pending[Output]], *, model: ServedModel | None = None, texts: int = 0
) -> Output:
    """The output of the call that ``submit`` queues.

    Args:
        request: If its client disconnects, the call is cancelled.
        submit: Checks and queues; runs in a thread, since it may tokenize.
        model: The model of the call; with it a full queue is noticed before a thread is used.
        texts: How many texts will be queued.

    Raises:
        EngineOverloadedError: Too many texts are waiting (429).
        RequestError: The deadline has passed (504).
        ClientGoneError: The client has disconnected.
    """
    request.state.texts = texts
    if model is not None:
        model.engine.check_room(texts)
    async with _until_disconnect_or_deadline(request):
        pending = await _submitted(prepare_executor_of(request).submit(submit))
        output = await _result(pending.future)
        if model is not None:
            record_work(request, model, pending, output)
        if not pending.finished:
            output = await asyncio.to_thread(pending.finish, output)
    usage = getattr(output, "usage", None)
    if usage is not None:
        request.state.tokens = getattr(request.state, "tokens", 0) + usage.prompt_tokens
    return output


async def _result(future: Future[Output]) -> Output:
    """The engine's output; cancelling this coroutine drops the queued part of the call."""
    try:
        return await asyncio.wrap_future(future)  # cancelling it cancels the future
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():  # cancelled by the engine
            raise EngineClosedError("the engine was stopped before this request had its turn") from None
        raise


async def _submitted(submission: Future[Pending[Output]]) -> Pending[Output]:
    """The submitted call; cancelling this coroutine cancels the call as soon as it exists."""
    try:
        return await asyncio.wrap_future(submission)
    except asyncio.CancelledError:
        submission.add_done_callback(_cancel)
        raise


def _cancel(submission: Future[Pending[Any]]) -> None:
    if not submission.cancelled() and submission.exception() is None:
        submission.result().future.cancel()


@asynccontextmanager
async def _until_disconnect_or_deadline(request: Request) -> AsyncIterator[None]:
    """Cancel the body of the block when the client disconnects or the deadline passes."""
    task = asyncio.current_task()
    assert task is not None
    disconnected = over = False

    def cancel_body(_: Awaitable[None]) -> None:
        nonlocal disconnected
        if not (over or watch.cancelled()):
            disconnected = True
            task.cancel()

    watch = asyncio.ensure_future(_disconnection(request))
    watch.add_done_callback(cancel_body)
    try:
        async with asyncio.timeout_at(getattr(request.state, "deadline", None)):
            yield
    except asyncio.CancelledError:
        if disconnected and not task.uncancel():
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
    """Returns when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
