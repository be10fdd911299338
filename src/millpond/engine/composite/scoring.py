"""Scoring: pairs of texts that are computed apart, in two calls, and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.engine.composite.gather import combine
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.errors import InvalidRequestError
from millpond.tasks import Role, ScoreMeasure, Similarity
from millpond.values.inputs import Pair
from millpond.values.outputs import EmbeddingOutput, ScoreOutput, Usage
from millpond.values.params import PoolingParams

# Embeds texts, if the queue has room for this many more; the timer measures the whole score.
Embed = Callable[[Sequence[str], Role, int, CallTimer], Future[Any]]
Slots = npt.NDArray[np.int64]  # [pairs] index of each pair's query among the queries; equal for equal queries
Scores = npt.NDArray[np.float32]  # [pairs]


@dataclass(frozen=True, kw_only=True)
class Sides:
    """How the two vectors of a pair are made and compared."""

    query: PoolingParams
    document: PoolingParams
    similarity: Similarity
    cut: int | None  # dimensions that are compared; `None`: all


def pair_up(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[Pair]:
    """Pair up queries and documents: ``1-1``, ``1-N`` or ``N-N``."""
    query_list, document_list = _as_list(queries, "queries"), _as_list(documents, "documents")
    if len(query_list) == 1:
        query_list = query_list * len(document_list)
    if len(query_list) != len(document_list):
        raise InvalidRequestError(
            f"{len(query_list)} queries and {len(document_list)} documents do not pair up; pass one query, or as many "
            "as documents"
        )
    return [Pair(query, document) for query, document in zip(query_list, document_list, strict=True)]


def _as_list(texts: str | Sequence[str], name: str) -> list[str]:
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | dict) or not hasattr(texts, "__iter__"):
        raise TypeError(f"{name} is a {type(texts).__name__}; pass a str or a list of them")
    return list(texts)


def apart(
    pairs: Sequence[Pair],
    embed: Embed,
    score: Callable[[Any, Any, Slots], Scores],
    threads: Executor | None,
    *,
    method: ScoreMeasure,
) -> CallFuture[ScoreOutput]:
    """Score ``pairs`` by two calls, one over the queries and one over the documents; ``method`` is what ``score`` does.

    Both calls are as long as ``pairs``, so that an index in an error names a pair; but one query for all
    documents is one text, and counts once. ``threads`` run ``score``; ``None``: the thread that ends the later call.
    """
    queries = [pair.query for pair in pairs]
    first_of: dict[str, int] = {}
    slots = np.array([first_of.setdefault(query, i) for i, query in enumerate(queries)], dtype=np.int64)
    if len(first_of) == 1:
        queries = queries[:1]
    timer = CallTimer()
    starts = [
        partial(embed, queries, "query", len(queries) + len(pairs), timer),
        partial(embed, [pair.document for pair in pairs], "document", 0, timer),
    ]

    def assemble(results: list[Any]) -> ScoreOutput:
        query, document = results
        return ScoreOutput(
            scores=score(query, document, slots),
            method=method,
            truncated=query.truncated[slots] | document.truncated,
            usage=Usage(prompt_tokens=query.usage.prompt_tokens + document.usage.prompt_tokens),
        )

    return combine(starts, assemble, threads, timer)


def compare(
    similarity: Similarity, cut: int | None, queries: EmbeddingOutput, documents: EmbeddingOutput, slots: Slots
) -> Scores:
    """The similarity of each pair by the first ``cut`` dimensions, ``[pairs]``; the cosine takes unit vectors."""
    left, right = queries.embeddings[slots, :cut], documents.embeddings[:, :cut]  # [pairs, d]
    if similarity in ("cosine", "dot"):
        products: Scores = np.einsum("nd,nd->n", left, right)
        return products
    distances: Scores = np.linalg.norm(left - right, ord=1 if similarity == "manhattan" else 2, axis=1)
    return -distances


def scored_pair(sides: Sides, query: EmbeddingOutput, document: EmbeddingOutput) -> ScoreOutput:
    """The output of one pair, from its vectors."""
    return ScoreOutput(
        scores=compare(sides.similarity, sides.cut, query, document, np.zeros(1, dtype=np.int64)),
        method=sides.similarity,
        truncated=query.truncated | document.truncated,
        usage=Usage(prompt_tokens=query.usage.prompt_tokens + document.usage.prompt_tokens),
    )


def vector_params(
    params: PoolingParams, role: Role, *, normalize: bool | None = True, dimensions: int | None = None
) -> PoolingParams:
    """Options to embed one side of a pair with; ``normalize=None`` and ``dimensions=None``: as the checkpoint does."""
    unread = sorted(params.given() - {"task", "truncate", "truncate_prompt_tokens"})
    if unread:
        raise InvalidRequestError(
            f"{unread[0]}={getattr(params, unread[0])!r} means nothing to a score of two vectors; leave it out"
        )
    return PoolingParams(
        role=role,
        normalize=normalize,
        dimensions=dimensions,
        truncate=params.truncate,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
    )
