"""Reranking by MaxSim: with a late-interaction checkpoint, or with the token states of any encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millpond.engine.async_engine import AsyncEngine
from millpond.engine.engine import Engine
from millpond.engine.input import validate
from millpond.outputs import RerankOutput
from millpond.params import PoolingParams
from millpond.tasks import Truncate


def rerank(
    engine: Engine,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None = None,
    truncate: Truncate = "end",
) -> RerankOutput:
    """Documents by how well their tokens answer those of a query, best first.

    A late-interaction checkpoint reads query and document as it was trained to. Of any other encoder the token states
    are taken, L2-normalized, special tokens and the prompt of each role included; a score is at most the number of the
    query's tokens then. ``Engine.rerank`` compares one vector per text instead, where the checkpoint is an embedder.

    Args:
        engine: An engine that serves ``token_embed``.
        query: The query.
        documents: A list of documents; duplicates are computed once.
        top_n: Keep the best only; ``None`` keeps all.
        truncate: ``"end"`` or ``"start"`` of an over-long text is cut; ``"error"`` refuses it.

    Returns:
        A sequence of :class:`~millpond.RerankResult`; of equal scores the earlier document comes first.

    Raises:
        TypeError: ``query`` is no str, or ``documents`` a bare one.
        UnsupportedTaskError: The checkpoint has no token states to give.
        InvalidRequestError: A text or an option that cannot be served; nothing was queued.
        EngineOverloadedError: Too many texts are waiting.
        EngineClosedError: The engine was closed.
    """
    pairs = validate.reranked(query, documents, top_n)
    future = engine.submit_score(pairs, PoolingParams(truncate=truncate), maxsim=True)
    try:
        scored = future.result()
    except BaseException:
        future.cancel()  # the caller was interrupted: nobody waits for the rest
        raise
    return validate.ranked(scored, pairs, top_n)


async def arerank(
    engine: Engine | AsyncEngine,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None = None,
    truncate: Truncate = "end",
) -> RerankOutput:
    """As :func:`rerank`, for an event loop; cancelling the task drops what is still queued.

    Args:
        engine: An engine that serves ``token_embed``.
        query: As :func:`rerank`.
        documents: As :func:`rerank`.
        top_n: As :func:`rerank`.
        truncate: As :func:`rerank`.
    """
    if isinstance(engine, AsyncEngine):
        engine = engine.engine
    pairs = validate.reranked(query, documents, top_n)
    future = engine.submit_score(pairs, PoolingParams(truncate=truncate), maxsim=True)
    return validate.ranked(await asyncio.wrap_future(future), pairs, top_n)
