"""AsyncEngine: the same calls for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Literal, Self

import numpy.typing as npt

from millpond.engine.composite.scoring import pair_up
from millpond.engine.engine import Engine
from millpond.engine.input import validate
from millpond.engine.progress import progress_bar
from millpond.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    RerankOutput,
    RewardOutput,
    ScoreOutput,
    SparseEmbeddingOutput,
    TokenClassificationOutput,
    TokenEmbeddingOutput,
)
from millpond.params import PoolingParams
from millpond.spec import ModelSpec
from millpond.tasks import Activation, Aggregation, OutputDtype, Role, Task, Truncate

# More texts than this are checked, and duplicates among them found, beside the loop.
_MANY = 2048
# Vectors handed from a thread to the loop at a time.
_WINDOW = 256


class AsyncEngine:
    """Awaits an engine's futures; the loop never tokenizes, computes or reads the cache.

    Cancelling the awaiting task drops what is still queued. Several loops and threads may share one engine.

    Args:
        engine: The engine; closing this object leaves it open unless ``await aclose()`` is called.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def spec(self) -> ModelSpec:
        """What the checkpoint is."""
        return self.engine.spec

    @property
    def tasks(self) -> frozenset[Task]:
        """What the checkpoint serves."""
        return self.engine.tasks

    async def embed(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        output_dtype: OutputDtype = "float32",
        adapter: str | None = None,
        chunking: Literal["mean"] | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> EmbeddingOutput:
        """As :meth:`millpond.Engine.embed`."""
        params = PoolingParams(
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            output_dtype=output_dtype,
            adapter=adapter,
            chunking=chunking,
            truncate=truncate,
        )
        output: EmbeddingOutput = await self._run("embed", texts, params, show_progress)
        return output

    async def embed_iter(
        self,
        texts: Iterable[str] | AsyncIterable[str],
        *,
        role: Role | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        output_dtype: OutputDtype = "float32",
        adapter: str | None = None,
        chunking: Literal["mean"] | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> AsyncIterator[npt.NDArray[Any]]:
        """As :meth:`millpond.Engine.embed_iter`; ``texts`` may be an asynchronous iterable, too."""
        if isinstance(texts, AsyncIterable):
            texts = _pulled(aiter(texts), asyncio.get_running_loop())
        rows = self.engine.embed_iter(
            texts,
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            output_dtype=output_dtype,
            adapter=adapter,
            chunking=chunking,
            truncate=truncate,
            show_progress=show_progress,
        )
        while (chunk := await asyncio.to_thread(_take, rows, _WINDOW)) != []:
            for row in chunk:
                yield row

    async def token_embed(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        adapter: str | None = None,
        spans: Sequence[Sequence[tuple[int, int]]] | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> TokenEmbeddingOutput:
        """As :meth:`millpond.Engine.token_embed`."""
        params = PoolingParams(
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            adapter=adapter,
            truncate=truncate,
        )
        items = texts if spans is None else validate.spanned(texts, spans)
        output: TokenEmbeddingOutput = await self._run("token_embed", items, params, show_progress)
        return output

    async def sparse_embed(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> SparseEmbeddingOutput:
        """As :meth:`millpond.Engine.sparse_embed`."""
        params = PoolingParams(role=role, truncate=truncate)
        output: SparseEmbeddingOutput = await self._run("sparse_embed", texts, params, show_progress)
        return output

    async def classify(
        self,
        texts: Sequence[str],
        *,
        activation: bool | Activation | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> ClassificationOutput:
        """As :meth:`millpond.Engine.classify`."""
        params = PoolingParams(activation=activation, truncate=truncate)
        output: ClassificationOutput = await self._run("classify", texts, params, show_progress)
        return output

    async def token_classify(
        self,
        texts: Sequence[str],
        *,
        aggregation: Aggregation = "none",
        activation: bool | Activation | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> TokenClassificationOutput:
        """As :meth:`millpond.Engine.token_classify`."""
        params = PoolingParams(aggregation=aggregation, activation=activation, truncate=truncate)
        output: TokenClassificationOutput = await self._run("token_classify", texts, params, show_progress)
        return output

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        activation: bool | Activation | None = None,
        instruction: str | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> ScoreOutput:
        """As :meth:`millpond.Engine.score`."""
        params = PoolingParams(activation=activation, instruction=instruction, truncate=truncate)
        output: ScoreOutput = await self._run("score", pair_up(queries, documents), params, show_progress)
        return output

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> RerankOutput:
        """As :meth:`millpond.Engine.rerank`."""
        pairs = validate.reranked(query, documents, top_n)
        params = PoolingParams(instruction=instruction, truncate=truncate)
        scored: ScoreOutput = await self._run("score", pairs, params, show_progress)
        return validate.ranked(scored, pairs, top_n)

    async def reward(
        self,
        texts_or_conversations: Sequence[str | Sequence[Mapping[str, str]]],
        *,
        step_tag_id: int | None = None,
        returned_token_ids: Sequence[int] | None = None,
        activation: bool | Activation | None = None,
        truncate: Truncate = "end",
        show_progress: bool = False,
    ) -> RewardOutput:
        """As :meth:`millpond.Engine.reward`."""
        params = PoolingParams(
            step_tag_id=step_tag_id,
            returned_token_ids=returned_token_ids,  # type: ignore[arg-type]  # checked, and made a tuple, there
            activation=activation,
            truncate=truncate,
        )
        output: RewardOutput = await self._run("reward", texts_or_conversations, params, show_progress)
        return output

    async def encode(
        self,
        texts: Sequence[Any],
        *,
        task: Task,
        params: PoolingParams | None = None,
        show_progress: bool = False,
    ) -> Any:
        """As :meth:`millpond.Engine.encode`."""
        return await self._run(task, texts, params or PoolingParams(), show_progress)

    async def submit(self, task: Task, inputs: Sequence[Any], params: PoolingParams | None = None) -> Any:
        """As :meth:`millpond.Engine.submit`, awaited: the task's output."""
        return await self._run(task, inputs, params or PoolingParams(), False)

    async def _run(self, task: Task, texts: Sequence[Any], params: PoolingParams, show_progress: bool) -> Any:
        with progress_bar(texts, show=show_progress) as bar:
            progress = bar.update if show_progress else None
            start = partial(self.engine._start, task, texts, params, progress=progress)
            if task == "reward" or getattr(params, "chunking", None) is not None:
                # Conversations and windows are tokenized before anything is queued.
                future = await _elsewhere(start, asyncio.to_thread)
            elif len(texts) > _MANY:  # which take time to check: in a thread of the engine's
                future = await _elsewhere(start, self.engine._in_thread)
            else:
                future = start()
            return await asyncio.wrap_future(future)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the engine; the loop goes on while it drains."""
        await asyncio.to_thread(self.engine.close)


async def _elsewhere(
    start: Callable[[], Future[Any]], thread: Callable[[Callable[[], Future[Any]]], Awaitable[Future[Any]]]
) -> Future[Any]:
    """What ``start`` returns, called in a ``thread``; cancelled, if the awaiting task is, whenever it comes."""
    gone, started = threading.Event(), []

    def run() -> Future[Any]:
        started.append(future := start())
        if gone.is_set():
            future.cancel()
        return future

    try:
        return await thread(run)
    except asyncio.CancelledError:
        gone.set()
        for future in started:
            future.cancel()
        raise


def _pulled(texts: AsyncIterator[str], loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """An asynchronous iterator's texts for a thread that reads them; some at a time, since each turn is a hand-over."""

    async def some() -> list[str]:
        found: list[str] = []
        async for text in texts:
            found.append(text)
            if len(found) == _WINDOW:
                break
        return found

    while found := asyncio.run_coroutine_threadsafe(some(), loop).result():
        yield from found


def _take(rows: Iterator[npt.NDArray[Any]], count: int) -> list[npt.NDArray[Any]]:
    return list(islice(rows, count))
