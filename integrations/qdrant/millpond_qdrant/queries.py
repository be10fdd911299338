"""The requests of a search: coarse to fine, the points that lack some of the collection's vectors, and hybrid.

A framework writes one vector per point, so a collection of several widths may hold points that only have ``d384``.
Qdrant leaves a point out of a search by a vector that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from qdrant_client import models

from millpond.ingest.sinks.protocol import vector_name
from millpond.ingest.sinks.search import SearchPlan

SPARSE = "sparse"
"""The name of the sparse vector."""

# Qdrant counts ranks from 0: 1 / (61 + rank) is 1 / (60 + rank) of ranks from 1, as everywhere else.
_RRF = models.RrfQuery(rrf=models.Rrf(k=61))

Params = Callable[[Literal["coarse", "full", "only"]], models.SearchParams | None]
"""How a stage is searched."""


def sparse_vector(weights: Mapping[int, float]) -> models.SparseVector:
    """Token ids and their weights, by ascending id."""
    tokens = sorted(weights)
    return models.SparseVector(indices=tokens, values=[float(weights[token]) for token in tokens])


def fused_query_of(
    plan: SearchPlan, native: models.Filter | None, *, lacked: Collection[str], params: Params
) -> models.QueryRequest:
    """The request of a hybrid search: the rankings of :func:`queries_of` and that of the sparse vectors.

    Points that lack the largest width are a ranking of their own.
    """
    rankings = [
        models.Prefetch(
            query=request.query,
            using=request.using,
            prefetch=request.prefetch,
            filter=request.filter,
            params=request.params,
            limit=plan.candidates,
        )
        for request in queries_of(plan, native, lacked=lacked, params=params, limit=plan.candidates)
    ]
    if plan.sparse:  # a question without a token of weight has no such ranking
        query = sparse_vector(plan.sparse)
        rankings.append(models.Prefetch(query=query, using=SPARSE, filter=native, limit=plan.candidates))
    return models.QueryRequest(prefetch=rankings, query=_RRF, limit=plan.k, with_payload=True)


def queries_of(
    plan: SearchPlan,
    native: models.Filter | None,
    *,
    lacked: Collection[str],
    params: Params,
    limit: int | None = None,
) -> list[models.QueryRequest]:
    """The requests whose answers together, by score, are the answer to a search.

    The first ranks the points that have the largest width: the candidates of the smallest, and beside them the best of
    those that lack the smallest width. The others rank the points whose largest width is a smaller one, by
    that width. No point is in two answers.
    """
    limit = plan.k if limit is None else limit
    full = vector_name(plan.full)
    stages = []
    if plan.coarse is not None:
        coarse = vector_name(plan.coarse)
        # A candidate that lacks the largest width would only take another one's place.
        scored = _vectors(native, has=[full]) if full in lacked else native
        stages.append(_prefetch(plan, plan.coarse, scored, params("coarse"), limit=plan.candidates))
        if coarse in lacked:
            stages.append(_prefetch(plan, plan.full, _vectors(native, lacks=[coarse]), params("only"), limit=limit))
    stage: Literal["full", "only"] = "full" if stages else "only"
    requests = [_request(plan, plan.full, native, params(stage), limit=limit, stages=stages)]
    larger = [full]
    for width in sorted(set(plan.vectors) - {plan.full}, reverse=True):
        if not set(larger) <= set(lacked):  # no point lacks all of them
            break
        requests.append(_request(plan, width, _vectors(native, lacks=larger), params("only"), limit=limit))
        larger.append(vector_name(width))
    return requests


def _prefetch(
    plan: SearchPlan, width: int, filter: models.Filter | None, params: models.SearchParams | None, *, limit: int
) -> models.Prefetch:
    return models.Prefetch(
        query=plan.vectors[width].tolist(), using=vector_name(width), filter=filter, params=params, limit=limit
    )


def _request(
    plan: SearchPlan,
    width: int,
    filter: models.Filter | None,
    params: models.SearchParams | None,
    *,
    limit: int,
    stages: Sequence[models.Prefetch] = (),
) -> models.QueryRequest:
    return models.QueryRequest(
        query=plan.vectors[width].tolist(),
        using=vector_name(width),
        prefetch=list(stages) or None,
        filter=filter,
        params=params,
        limit=limit,
        with_payload=True,
    )


def _vectors(native: models.Filter | None, *, has: Sequence[str] = (), lacks: Sequence[str] = ()) -> models.Filter:
    """The points that match a filter, have these vectors and lack those."""
    present: list[models.Condition] = [models.HasVectorCondition(has_vector=name) for name in has]
    return models.Filter(
        must=present if native is None else [native, *present],
        must_not=[models.HasVectorCondition(has_vector=name) for name in lacks],
    )
