"""Reranking by MaxSim, for any engine with token vectors: ``Engine.rerank(..., method="maxsim")`` as functions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, cast

from millpond.inputs import Pair, rerank_pairs
from millpond.outputs import RerankOutput, ScoreOutput, rank
from millpond.params import PoolingParams
from millpond.tasks import ScoreMethod, Task, Truncate


class RerankEngine(Protocol):
    """The part of :class:`millpond.Engine` that reranking needs."""

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        method: ScoreMethod = "auto",
        truncate: Truncate = "end",
    ) -> RerankOutput:
        """As :meth:`millpond.Engine.rerank`."""
        ...

    def submit(
        self, task: Task, inputs: Sequence[Pair], params: PoolingParams, *, method: ScoreMethod = "auto"
    ) -> Future[ScoreOutput]:
        """As :meth:`millpond.Engine.submit`."""
        ...


class AsyncRerankEngine(Protocol):
    """The part of :class:`millpond.AsyncEngine` that reranking needs."""

    @property
    def engine(self) -> RerankEngine:
        """The engine whose futures it awaits."""
        ...


def rerank(
    engine: RerankEngine,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None = None,
    truncate: Truncate = "end",
) -> RerankOutput:
    """Documents sorted by how well their tokens match those of a query, best first.

    The same as ``engine.rerank(query, documents, method="maxsim")``. A late-interaction checkpoint reads query and
    document as it was trained to. Any other encoder gives its token states, L2-normalized, special tokens and the
    prompt of each role included; a score is then at most the number of the query's tokens. ``Engine.rerank`` does the
    same by default, but for a checkpoint that reads both texts together: here such a checkpoint is refused.

    Args:
        engine: An engine that serves ``token_embed``.
        query: The query.
        documents: A list of documents; duplicates are computed once.
        top_n: Keep the best only; ``None`` keeps all.
        truncate: ``"end"`` or ``"start"`` cuts that end of an over-long text; ``"error"`` refuses the text.

    Returns:
        A sequence of :class:`~millpond.RerankResult`; of equal scores the earlier document comes first.

    Raises:
        TypeError: ``query`` is not a str, ``documents`` is a bare str, or ``engine`` is an ``AsyncEngine``.
        UnsupportedTaskError: The checkpoint has no token vectors.
        InvalidRequestError: A text or an option that cannot be served; nothing was queued.
        EngineOverloadedError: Too many texts are waiting.
        EngineClosedError: The engine was closed.
    """
    if hasattr(engine, "engine"):  # an AsyncEngine, whose rerank would return a coroutine
        raise TypeError(f"rerank takes an Engine, not an {type(engine).__name__}; write await arerank(engine, ...)")
    return engine.rerank(query, documents, top_n=top_n, method="maxsim", truncate=truncate)


async def arerank(
    engine: RerankEngine | AsyncRerankEngine,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None = None,
    truncate: Truncate = "end",
) -> RerankOutput:
    """As :func:`rerank`, for an event loop; cancelling the task drops what is still queued.

    Args:
        engine: An engine that serves ``token_embed``, or an :class:`~millpond.AsyncEngine` over one.
        query: As :func:`rerank`.
        documents: As :func:`rerank`.
        top_n: As :func:`rerank`.
        truncate: As :func:`rerank`.
    """
    inner = cast("RerankEngine", getattr(engine, "engine", engine))  # an AsyncEngine has its engine there
    pairs = rerank_pairs(query, documents, top_n)
    future = inner.submit("score", pairs, PoolingParams(truncate=truncate), method="maxsim")
    return rank(await asyncio.wrap_future(future), [pair.document for pair in pairs], top_n=top_n)
