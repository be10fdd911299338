"""Scoring: pairs of texts by what the checkpoint is; a cross-encoder reads them together, others apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.engine.composite.gather import combine
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.errors import InvalidRequestError
from millpond.inputs import Pair
from millpond.late_interaction.similarity import maxsim
from millpond.outputs import EmbeddingOutput, ScoreOutput, TokenEmbeddingOutput, Usage
from millpond.params import PoolingParams
from millpond.ragged import Ragged
from millpond.tasks import Role

# Embeds texts; so many ask for room in the queue, and the clock is that of the whole score.
Start = Callable[[Sequence[str], Role, int, CallTimer], Future[Any]]


def pair_up(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[Pair]:
    """``1-1``, ``1-N`` or ``N-N`` as pairs.

    Raises:
        InvalidRequestError: Any other numbers.
        TypeError: Neither texts nor lists of them.
    """
    left, right = _listed(queries, "queries"), _listed(documents, "documents")
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise InvalidRequestError(
            f"{len(left)} queries and {len(right)} documents do not pair up; pass one query, or as many as documents"
        )
    return [Pair(query, document) for query, document in zip(left, right, strict=True)]


def _listed(texts: str | Sequence[str], name: str) -> list[str]:
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | dict) or not hasattr(texts, "__iter__"):
        raise TypeError(f"{name} is a {type(texts).__name__}; pass a str or a list of them")
    return list(texts)


def apart(
    pairs: Sequence[Pair], embed: Start, score: Callable[[Any, Any, Places], Scores], threads: Executor
) -> CallFuture[ScoreOutput]:
    """Score ``pairs`` by two calls, one over the queries and one over the documents.

    Both are as long as the pairs, so that an error names a pair by its index; but one query for all documents is one
    text, and counts once.
    """
    queries = [pair.query for pair in pairs]
    slots: dict[str, int] = {}
    asked = np.array([slots.setdefault(query, i) for i, query in enumerate(queries)], dtype=np.int64)
    if len(slots) == 1:
        queries = queries[:1]
    timer = CallTimer()
    parts: list[Future[Any]] = []
    try:
        parts.append(embed(queries, "query", len(queries) + len(pairs), timer))
        parts.append(embed([pair.document for pair in pairs], "document", 0, timer))
    except BaseException:
        for part in parts:
            part.cancel()
        raise

    def assemble(results: list[Any]) -> ScoreOutput:
        query, document = results
        return ScoreOutput(
            scores=score(query, document, asked),
            truncated=query.truncated[asked] | document.truncated,
            usage=Usage(prompt_tokens=query.usage.prompt_tokens + document.usage.prompt_tokens),
        )

    return combine(parts, assemble, threads, timer)


Places = npt.NDArray[np.int64]  # [pairs] where the pair's query is; equal for equal queries
Scores = npt.NDArray[np.float32]


def cosine(queries: EmbeddingOutput, documents: EmbeddingOutput, asked: Places) -> Scores:
    """Products of unit vectors, ``[pairs]``."""
    out: Scores = np.einsum("nd,nd->n", queries.embeddings[asked], documents.embeddings)
    return out


def late_interaction(
    queries: TokenEmbeddingOutput, documents: TokenEmbeddingOutput, asked: Places, *, mean: bool
) -> Scores:
    """MaxSim of each pair, ``[pairs]``; ``mean`` divides by the query's tokens."""
    scores = np.empty(len(asked), dtype=np.float32)
    width = queries.embeddings.flat.shape[1]
    for query in np.unique(asked):
        mine = np.flatnonzero(asked == query)
        question = queries.embeddings[int(query)]
        one = Ragged.from_matrices([question], width=width)
        many = Ragged.from_matrices([documents.embeddings[int(place)] for place in mine], width=width)
        scores[mine] = maxsim(one, many)[0] / (len(question) if mean else 1)
    return scores


def vector_params(params: PoolingParams, role: Role, *, normalize: bool | None = True) -> PoolingParams:
    """How the two sides of a pair are embedded; ``normalize=None`` is the checkpoint's habit.

    Raises:
        InvalidRequestError: An option for logits, which there are none of here.
    """
    unread = sorted(params.given() - {"task", "truncate", "truncate_prompt_tokens"})
    if unread:
        raise InvalidRequestError(
            f"{unread[0]}={getattr(params, unread[0])!r} means nothing to a score of two vectors; leave it out"
        )
    return PoolingParams(
        role=role,
        normalize=normalize,
        truncate=params.truncate,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
    )
