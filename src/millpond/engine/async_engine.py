"""AsyncEngine: the same calls for an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from itertools import islice
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast

import numpy.typing as npt

from millpond.engine import timed_rerank
from millpond.engine.composite import scoring
from millpond.engine.composite.timed_ranking import TimeBudget
from millpond.engine.engine import Engine, submission_of
from millpond.engine.execute.interrupts import is_interrupt
from millpond.engine.schedule.call import CallOptions
from millpond.engine.schedule.truncation import TruncatedTexts
from millpond.engine.submission import Submission
from millpond.engine.task_methods import EmbedOptions, TaskMethods
from millpond.engine.tokenize.large_texts import is_large
from millpond.support.progress import progress_bar
from millpond.tasks import Role, ScoreMethod, Task, Truncate
from millpond.values.inputs import Pair
from millpond.values.outputs import ScoreOutput, TokenSpans
from millpond.values.params import PoolingParams
from millpond.values.replacements import names_replacements
from millpond.values.spec import ModelSpec

# More texts than this are checked and deduplicated in a thread, not in the loop.
_LOOP_TEXTS = 2048
# Vectors handed from a thread to the loop at a time.
_WINDOW = 256

P = ParamSpec("P")
Output = TypeVar("Output")


class _Coroutines(TaskMethods):
    """The methods of the tasks; each returns a coroutine of its output."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission

    async def _run(
        self,
        task: Task,
        inputs: Sequence[Any],
        params: PoolingParams,
        show_progress: bool,
        *,
        method: ScoreMethod = "auto",
        ranking: bool = False,
        finish: Callable[[Any], Any] | None = None,
    ) -> Any:
        direct = None if show_progress else self._submission.direct(task, inputs, params, method)
        if direct is not None and (running := direct.submit(inputs[0])) is not None:
            output = await asyncio.wrap_future(running)
            if output is not None:
                return output if finish is None else finish(output)
        if task == "score" and not show_progress:
            scored = await self._score_pair(inputs, params, method, ranking)
            if scored is not None:
                return scored if finish is None else finish(scored)
        with progress_bar(inputs, show=show_progress) as bar:
            progress = bar.update if show_progress else None
            options = CallOptions(progress=progress)
            start = partial(self._submission.start, task, inputs, params, options, method=method, ranking=ranking)
            entities = task == "token_classify" and getattr(params, "labels", None) is not None
            if task == "reward" or entities or getattr(params, "long_texts", None) is not None:
                # Conversations, windows and words are tokenized before anything is queued.
                large = any(map(_is_large, inputs))
                thread = partial(self._submission.in_thread, large=True) if large else asyncio.to_thread
                future = await _in_thread(start, thread)
            elif len(inputs) * len(getattr(params, "labels", None) or (0,)) > _LOOP_TEXTS:
                future = await _in_thread(start, self._submission.in_thread)
            else:
                future = start()
            output = await asyncio.wrap_future(future)
        return output if finish is None else finish(output)

    async def _score_pair(
        self, inputs: Sequence[Any], params: PoolingParams, method: ScoreMethod, ranking: bool
    ) -> ScoreOutput | None:
        """The score of one pair by two vectors, each of which is computed by itself while nothing else runs."""
        found = self._submission.direct_sides(inputs, params, method, ranking)
        if found is None:
            return None
        sides, *directs = found
        vectors: list[Any] = []
        running = [direct.submit(text) for direct, text in zip(directs, inputs[0], strict=True)]
        try:
            for i, (noun, side) in enumerate((("queries", sides.query), ("documents", sides.document))):
                future = running[i]
                vector = None if future is None else await asyncio.wrap_future(future)
                if vector is None:
                    with TruncatedTexts.called(noun):
                        running[i] = future = self._submission.start("embed", [inputs[0][i]], side)
                    vector = await asyncio.wrap_future(future)
                vectors.append(vector)
        finally:
            for future in running:
                if future is not None:
                    future.cancel()
        return scoring.scored_pair(sides, *vectors)

    async def _rank_timed(
        self,
        pairs: Sequence[Pair],
        params: PoolingParams,
        method: ScoreMethod,
        budget: TimeBudget,
        show_progress: bool,
    ) -> Any:
        ranking = timed_rerank.timed_ranking(self._submission, pairs, params, method, budget)
        with progress_bar(pairs, show=show_progress) as bar:
            while ranking.goes_on():
                turn = self._submission.turns.ask()
                try:
                    async with asyncio.timeout(ranking.left()):
                        await asyncio.wrap_future(turn)
                        future = timed_rerank.start_part(self._submission, ranking, params, method)
                        if future is not None:
                            bar.update(ranking.took(await asyncio.wrap_future(future)))  # cancelling cancels it
                except TimeoutError:
                    ranking.cut_off()
                finally:
                    self._submission.turns.leave(turn)
        return ranking.output()


def _awaited(
    method: Callable[Concatenate[TaskMethods, P], Output],
) -> Callable[Concatenate[AsyncEngine, P], Coroutine[Any, Any, Output]]:
    """A method of a task as a coroutine function with the same signature and documentation."""

    @wraps(method)
    async def call(self: AsyncEngine, /, *args: P.args, **options: P.kwargs) -> Output:
        return await cast("Awaitable[Output]", method(self._coroutines, *args, **options))

    return call


@names_replacements
class AsyncEngine:
    """Awaits an engine's futures; the loop never tokenizes, computes or reads the cache.

    The methods and their arguments are those of :class:`~millpond.Engine`. Cancelling the awaiting task drops what is
    still queued. Several loops and threads may share one engine.

    Args:
        engine: A loaded engine, or another AsyncEngine over it. It stays open until ``await aclose()`` or the end of an
            ``async with`` block. To load one in an event loop: ``await asyncio.to_thread(Engine, "model")``.

    Raises:
        TypeError: ``engine`` is something else, a model's name for example.
    """

    def __init__(self, engine: Engine | AsyncEngine) -> None:
        loaded = engine.engine if isinstance(engine, AsyncEngine) else engine
        if not isinstance(loaded, Engine):
            name = repr(os.fspath(loaded)) if isinstance(loaded, str | os.PathLike) else '"model"'
            raise TypeError(
                f"AsyncEngine takes a loaded Engine, not a {type(loaded).__name__}; write AsyncEngine(Engine({name})), "
                f"or in an event loop, which loading would block, AsyncEngine(await asyncio.to_thread(Engine, {name}))"
            )
        self.engine: Engine = loaded
        self._coroutines = _Coroutines(submission_of(loaded))

    @property
    def spec(self) -> ModelSpec:
        """The description of the checkpoint: architecture, pooling, widths, prompts, labels."""
        return self.engine.spec

    @property
    def tasks(self) -> frozenset[Task]:
        """The tasks that the checkpoint serves."""
        return self.engine.tasks

    embed = _awaited(TaskMethods.embed)
    token_embed = _awaited(TaskMethods.token_embed)
    sparse_embed = _awaited(TaskMethods.sparse_embed)
    classify = _awaited(TaskMethods.classify)
    token_classify = _awaited(TaskMethods.token_classify)
    score = _awaited(TaskMethods.score)
    rerank = _awaited(TaskMethods.rerank)
    reward = _awaited(TaskMethods.reward)
    encode = _awaited(TaskMethods.encode)

    async def embed_iter(
        self, texts: Iterable[str] | AsyncIterable[str], **options: Unpack[EmbedOptions]
    ) -> AsyncIterator[npt.NDArray[Any]]:
        """As :meth:`Engine.embed_iter`; ``texts`` may be an asynchronous iterable, too.

        Args:
            texts: An iterable of texts, asynchronous or not.
            **options: As :meth:`Engine.embed_iter`.

        Yields:
            A vector ``[d]`` for each text, in order.
        """
        if isinstance(texts, AsyncIterable):
            texts = _pulled(aiter(texts), asyncio.get_running_loop())
        rows = self.engine.embed_iter(texts, **options)
        while chunk := await asyncio.to_thread(lambda: list(islice(rows, _WINDOW))):
            for row in chunk:
                yield row

    async def token_spans(
        self, texts: Sequence[str], *, role: Role | None = None, truncate: Truncate = "auto"
    ) -> list[TokenSpans]:
        """As :meth:`Engine.token_spans`; the tokenizer works in a thread.

        Args:
            texts: As :meth:`Engine.token_spans`.
            role: As :meth:`Engine.token_spans`.
            truncate: As :meth:`Engine.token_spans`.

        Returns:
            :class:`~millpond.TokenSpans` of each text: ``tokens`` and ``offsets [rows, 2]``.
        """
        return await asyncio.to_thread(self.engine.token_spans, texts, role=role, truncate=truncate)

    async def submit(self, task: Task, inputs: Sequence[Any], params: PoolingParams | None = None) -> Any:
        """The output of any task by its name; ``inputs`` may be :class:`~millpond.TokenIds`, too.

        Args:
            task: The task.
            inputs: Texts; (query, document) pairs for ``score``; or :class:`~millpond.TokenIds`.
            params: The options of the call.

        Returns:
            The task's output.
        """
        return await self._coroutines._run(task, inputs, params or PoolingParams(), False)

    async def aclose(self, timeout: float | None = None, cancel: bool = False) -> None:  # noqa: ASYNC109 - Engine's
        """As :meth:`Engine.close`; the loop goes on meanwhile.

        Cancelling the awaiting task does not stop the closing; ``await aclose(cancel=True)`` ends it soon.

        Args:
            timeout: As :meth:`Engine.close`.
            cancel: As :meth:`Engine.close`.

        Raises:
            InvalidRequestError: ``timeout`` is negative or no number; nothing was closed.
        """
        # In a thread of its own: the threads of the loop may all wait for calls that this is to drop.
        thread = ThreadPoolExecutor(1, thread_name_prefix="millpond-close")
        closing = asyncio.get_running_loop().run_in_executor(thread, self.engine.close, timeout, cancel)
        thread.shutdown(wait=False)
        await asyncio.shield(closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(cancel=is_interrupt(error))


def _is_large(value: Any) -> bool:
    """Whether a text, or a message of a conversation, is tokenized in its turn."""
    if isinstance(value, Mapping):
        return _is_large(value.get("content"))
    if isinstance(value, list | tuple):
        return any(map(_is_large, value))
    return isinstance(value, str) and is_large(value)


async def _in_thread(
    start: Callable[[], Future[Any]], thread: Callable[[Callable[[], Future[Any]]], Awaitable[Future[Any]]]
) -> Future[Any]:
    """The future that ``start`` returns, called in a ``thread``; it is cancelled if the awaiting task is."""
    cancelled, started = threading.Event(), []

    def run() -> Future[Any]:
        started.append(future := start())
        if cancelled.is_set():
            future.cancel()
        return future

    try:
        return await thread(run)
    except asyncio.CancelledError:
        cancelled.set()
        for future in started:
            future.cancel()
        raise


def _pulled(texts: AsyncIterator[str], loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """The texts of an asynchronous iterator, for a thread; in groups, since each group is a hand-over to the loop."""

    async def read_group() -> list[str]:
        group: list[str] = []
        async for text in texts:
            group.append(text)
            if len(group) == _WINDOW:
                break
        return group

    while group := asyncio.run_coroutine_threadsafe(read_group(), loop).result():
        yield from group
