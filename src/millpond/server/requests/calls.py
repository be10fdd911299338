"""Calls: a route awaits the engine's result, and gives up when the client disconnects or the deadline passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

from fastapi import Request

from millpond.errors import EngineClosedError
from millpond.server.errors import ClientGoneError, RequestError
from millpond.server.requests.body_budget import BodyBudget
from millpond.server.requests.fields import check_count
from millpond.server.requests.lone_caller import lone_caller_of
from millpond.server.requests.prepare_executor import prepare_executor_of
from millpond.server.requests.response_budget import WAIT_SECONDS, ResultsFullError, response_budget_of
from millpond.server.requests.result_size import reserve_result
from millpond.server.responses.encoding import JSON_BYTES
from millpond.server.served.models import ServedModel
from millpond.server.state import state_of
from millpond.server.telemetry.timings import Work
from millpond.tasks import Task
from millpond.values.inputs import Item, TokenIds, size_of
from millpond.values.params import PoolingParams
from millpond.vllm.model import Pending
from millpond.vllm.prompts import Tokenization

Output = TypeVar("Output")


async def run(
    request: Request, submit: Callable[[], Pending[Output]], *, model: ServedModel | None = None, texts: int = 0
) -> Output:
    """The output of the call that ``submit`` queues, or runs."""
    request.state.texts = texts
    begun: Pending[Output] | None = None
    if model is not None:
        model.engine.check_room(texts)
        if lone_caller_of(request).comes(request, model.name) and texts == 1:
            begun = submit()
    done = begun is not None and begun.finished and begun.future.done()
    async with nullcontext() if done else _until_disconnect_or_deadline(request):
        pending = begun if begun is not None else await prepared(request, submit, abandon=_cancel)
        output: Output = await _result(pending.future)
        if model is not None:
            _record_work(request, model, pending, output)
        if not pending.finished:
            output = await asyncio.to_thread(pending.finish, output)
    usage = getattr(output, "usage", None)
    if usage is not None:
        request.state.tokens = getattr(request.state, "tokens", 0) + usage.prompt_tokens
    return output


def arrived(request: Request) -> float:
    """When the request came, by ``time.perf_counter``."""
    now = time.perf_counter()
    deadline: float | None = getattr(request.state, "deadline", None)
    if deadline is None:
        return now
    return now - (state_of(request).config.request_timeout - (deadline - asyncio.get_running_loop().time()))


async def prepared(
    request: Request, work: Callable[[], Output], *, abandon: Callable[[Future[Output]], None] = lambda _: None
) -> Output:
    """What ``work`` returns, called in a thread; as long as its result finds no room, it waits and is called again.

    ``abandon`` gets the future if the request ends first: the thread goes on.
    """
    end = asyncio.get_running_loop().time() + WAIT_SECONDS
    while True:
        working = prepare_executor_of(request).submit(work, body_bytes=BodyBudget.taken(request.scope))
        try:
            return await asyncio.wrap_future(working)
        except asyncio.CancelledError:
            working.add_done_callback(abandon)
            raise
        except ResultsFullError as full:
            try:
                async with asyncio.timeout_at(end):
                    await response_budget_of(request).wait(full)
            except TimeoutError:
                raise full from None


async def run_task(
    request: Request,
    model: ServedModel,
    task: Task,
    items: Sequence[Item],
    params: PoolingParams,
    tokenization: Tokenization,
    *,
    field: str,
    bytes_per_number: float = JSON_BYTES,
) -> Any:
    """The output of ``task`` for ``items``, which are in the request's ``field``."""
    check_count(request, len(items), field=field)
    pooling = model.pooling

    def submit() -> Pending[Any]:
        completed = pooling.complete(task, params, tokenization)
        reserve_result(request, model, task, items, completed, bytes_per_number=bytes_per_number)
        return pooling.submit(task, items, completed)

    return await run(request, submit, model=model, texts=len(items))


def _record_work(request: Request, model: ServedModel, pending: Pending[Any], output: Any) -> None:
    """Store the work of a finished call as ``request.state.work``, for the telemetry."""
    assert pending.future.timings is not None  # of every future with a result
    lone_caller_of(request).ran(pending.future.timings.total)
    request.state.work = Work(
        device=model.engine.device.partition(":")[0],
        timings=pending.future.timings,
        tokens=output.usage.prompt_tokens,
        characters=sum(size_of(item) for item in pending.items if not isinstance(item, TokenIds)),
        ended=time.time_ns(),
    )


async def _result(future: Future[Output]) -> Output:
    """The engine's output; cancelling this coroutine drops the queued part of the call."""
    if future.done() and not future.cancelled():
        return future.result()
    try:
        return await asyncio.wrap_future(future)  # cancelling it cancels the future
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():  # cancelled by the engine
            raise EngineClosedError("the engine was stopped before this request had its turn") from None
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

    async def disconnection() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(disconnection())
    watch.add_done_callback(cancel_body)
    try:
        async with asyncio.timeout_at(getattr(request.state, "deadline", None)):
            yield
    except asyncio.CancelledError:
        if disconnected and not task.uncancel():
            raise ClientGoneError from None
        raise
    except TimeoutError:
        seconds = state_of(request).config.request_timeout
        raise RequestError(
            f"The answer took more than {seconds:g} s; send fewer or shorter texts", status=504, type="Gateway Timeout"
        ) from None
    finally:
        over = True
        watch.cancel()
