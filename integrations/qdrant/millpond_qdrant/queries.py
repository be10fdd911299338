"""The requests of a search: the funnel, and the points that lack some of the collection's vectors.

A framework writes one vector per point, so a collection of several widths may hold points that only have ``d384``.
Qdrant leaves a point out of a search by a vector that it lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from qdrant_client import models

from millpond.ingest.search import SearchPlan
from millpond.ingest.sink import vector_name


def queries_of(plan: SearchPlan, native: models.Filter | None, *, lacked: Collection[str]) -> list[models.QueryRequest]:
    """The requests whose answers together, by score, are the answer to a search.

    The first ranks the points that have the largest width: the funnel's candidates, and beside them the best of those
    that lack the smallest width. The others rank the points whose largest width is a smaller one, by that width. No
    point is in two answers.

    Args:
        plan: The stages and the question's vectors.
        native: The condition on every point.
        lacked: Names of the vectors that some points may lack.
    """
    full = vector_name(plan.full)
    stages = []
    if plan.coarse is not None:
        coarse = vector_name(plan.coarse)
        # A candidate that lacks the largest width would only take another one's place.
        scored = _vectors(native, has=[full]) if full in lacked else native
        stages.append(_prefetch(plan, plan.coarse, scored, limit=plan.candidates))
        if coarse in lacked:
            stages.append(_prefetch(plan, plan.full, _vectors(native, lacks=[coarse]), limit=plan.k))
    requests = [_request(plan, plan.full, native, stages)]
    larger = [full]
    for width in sorted(set(plan.vectors) - {plan.full}, reverse=True):
        if not set(larger) <= set(lacked):  # no point lacks all of them
            break
        requests.append(_request(plan, width, _vectors(native, lacks=larger), []))
        larger.append(vector_name(width))
    return requests


def _prefetch(plan: SearchPlan, width: int, filter: models.Filter | None, *, limit: int) -> models.Prefetch:
    return models.Prefetch(query=plan.vectors[width].tolist(), using=vector_name(width), filter=filter, limit=limit)


def _request(
    plan: SearchPlan, width: int, filter: models.Filter | None, prefetch: list[models.Prefetch]
) -> models.QueryRequest:
    return models.QueryRequest(
        query=plan.vectors[width].tolist(),
        using=vector_name(width),
        prefetch=prefetch or None,
        filter=filter,
        limit=plan.k,
        with_payload=True,
    )


def _vectors(native: models.Filter | None, *, has: Sequence[str] = (), lacks: Sequence[str] = ()) -> models.Filter:
    """The points that match a filter, have these vectors and lack those."""
    present: list[models.Condition] = [models.HasVectorCondition(has_vector=name) for name in has]
    return models.Filter(
        must=present if native is None else [native, *present],
        must_not=[models.HasVectorCondition(has_vector=name) for name in lacks],
    )
