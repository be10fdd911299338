"""Retrieval: candidates of several searches, fused by their ranks, and then scored by MaxSim."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack
from weakref import WeakSet

from millpond.errors import InvalidRequestError
from millpond.late_interaction.index.arguments import Filter, check_candidates, check_count
from millpond.late_interaction.index.base import LateInteractionIndex
from millpond.late_interaction.index.documents import Hit

logger = logging.getLogger(__name__)

_WARNED: WeakSet[LateInteractionIndex] = WeakSet()  # indexes whose sources were warned of

CandidateSource = Literal["index", "exact"] | Callable[[str, int], Iterable[str] | Awaitable[Iterable[str]]]
"""Where candidates come from: the index's own search, the same without a first stage, or a function.

The function takes a query and the number of candidates wanted, and returns ids of the index, best first.
"""

# Cormack, Clarke and Büttcher, "Reciprocal Rank Fusion", SIGIR 2009: 60 was best on all their collections.
_CONSTANT = 60


class RetrieveOptions(TypedDict, total=False):
    """The options of :func:`retrieve`.

    Attributes:
        k: Most hits, 10 by default.
        sources: Where candidates come from; ``None`` is ``index.search`` alone.
        weights: A weight for each source; equal by default.
        candidates: How many each source is asked for, and how many are scored: ``max(100, 10 * k)`` by default. Without
            ``sources``, as of ``index.search``.
        filter: As of ``index.search``. It is applied to the candidates of a function after they were found, so a
            function that can filter itself should.
        exact: As of ``index.search``, without ``sources``.
    """

    k: int
    sources: Sequence[CandidateSource] | None
    weights: Sequence[float] | None
    candidates: int | None
    filter: Filter | None
    exact: bool


def retrieve(index: LateInteractionIndex, query: str, **options: Unpack[RetrieveOptions]) -> list[Hit]:
    """The documents that match a query best, among the candidates of several searches.

    Every source is asked for candidates. A candidate's score is the sum of ``weight / (60 + rank)`` over the sources
    that found it, and MaxSim sorts the best ``candidates`` by that. If fewer than ``k`` of these are in the index and
    match the filter, more are scored. Without ``sources`` this is ``index.search``.

    Raises:
        TypeError: ``query`` is not a str, a source is neither a name nor a function, or an option is unknown.
        InvalidRequestError: An argument out of range, or an awaitable source (use :func:`aretrieve`).
    """
    retrieval = _Retrieval(index=index, query=query, **options)
    if retrieval.sources is None:
        return retrieval.alone()
    rankings = []
    for source in retrieval.sources:
        found = retrieval.ask(source)
        if inspect.isawaitable(found):
            if inspect.iscoroutine(found):
                found.close()
            raise InvalidRequestError(f"the source {source!r} is asynchronous; await aretrieve(...) instead")
        rankings.append(_checked_ids(source, found))
    return retrieval.score(rankings)


async def aretrieve(index: LateInteractionIndex, query: str, **options: Unpack[RetrieveOptions]) -> list[Hit]:
    """As :func:`retrieve`, for an event loop: the sources are asked at the same time, plain functions in threads."""
    retrieval = _Retrieval(index=index, query=query, **options)
    if retrieval.sources is None:
        return await asyncio.to_thread(retrieval.alone)

    async def ranking_of(source: CandidateSource) -> list[str]:
        if inspect.iscoroutinefunction(source) or inspect.iscoroutinefunction(type(source).__call__):  # an object's
            found = retrieval.ask(source)
        else:
            found = await asyncio.to_thread(retrieval.ask, source)
        return _checked_ids(source, await found if inspect.isawaitable(found) else found)

    rankings = await asyncio.gather(*(ranking_of(source) for source in retrieval.sources))
    return await asyncio.to_thread(retrieval.score, rankings)


@dataclass(frozen=True, kw_only=True)
class _Retrieval:
    """The checked arguments of :func:`retrieve`, named as there."""

    index: LateInteractionIndex
    query: str
    k: int = 10
    sources: Sequence[CandidateSource] | None = None
    weights: Sequence[float] | None = None
    candidates: int | None = None
    filter: Filter | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        sources, weights = self.sources, self.weights
        if not isinstance(self.query, str):
            raise TypeError(f"query is of type {type(self.query).__name__}; pass one str")
        check_count("k", self.k)
        if sources is None:
            if weights is not None:
                raise InvalidRequestError(f"weights={weights!r} require sources; pass both, or leave weights out")
            return
        if isinstance(sources, str) or not isinstance(sources, Sequence):
            raise TypeError(f"sources is of type {type(sources).__name__}; pass a list of sources")
        if not sources:
            raise InvalidRequestError("sources=[] finds no candidates; leave it out to search the index")
        if self.exact:
            raise InvalidRequestError('exact=True searches the index alone; pass sources=["exact", ...] instead')
        check_candidates(self.candidates, self.k)
        if weights is not None and (len(weights) != len(sources) or not all(weight >= 0 for weight in weights)):  # NaN
            raise InvalidRequestError(
                f"weights={list(weights)!r} must be {len(sources)} numbers from 0, one for each source"
            )
        for source in sources:
            if not callable(source) and source not in ("index", "exact"):
                raise TypeError(
                    f'{source!r} is not a source of candidates; pass "index", "exact" or a function (query, limit)'
                )

    @property
    def limit(self) -> int:
        """How many candidates each source is asked for."""
        return self.candidates if self.candidates is not None else max(100, 10 * self.k)

    def alone(self) -> list[Hit]:
        """A search without sources."""
        k, filter, candidates = self.k, self.filter, self.candidates
        return self.index.search([self.query], k=k, filter=filter, candidates=candidates, exact=self.exact)[0]

    def ask(self, source: CandidateSource) -> Any:
        """What a source finds."""
        if not isinstance(source, str):
            return source(self.query, self.limit)
        hits = self.index.search([self.query], k=self.limit, filter=self.filter, exact=source == "exact")[0]
        return [hit.id for hit in hits]

    def score(self, rankings: Sequence[Sequence[str]]) -> list[Hit]:
        """The best of the fused candidates, by MaxSim; of equal ones the id that was seen first comes first."""
        scores: dict[str, float] = {}
        for ranking, weight in zip(rankings, self.weights or [1.0] * len(rankings), strict=True):
            for rank, id in enumerate(dict.fromkeys(ranking), start=1):
                scores[id] = scores.get(id, 0.0) + weight / (_CONSTANT + rank)
        fused = sorted(scores, key=lambda id: -scores[id])
        hits: list[Hit] = []
        # The best may hold too few that the index has and the filter lets through: then more are scored.
        for best in range(self.limit, len(fused) + self.limit, self.limit):
            hits = self.index.search([self.query], k=self.k, ids=fused[:best], filter=self.filter, exact=True)[0]
            if len(hits) == self.k:
                break
        if fused and not hits and not self.filter and self.index not in _WARNED:
            _WARNED.add(self.index)
            message = (
                "none of %d candidates is in the index (the first is %r); sources must return the ids of the index"
            )
            logger.warning(message, len(fused), fused[0])
        return hits


def _checked_ids(source: CandidateSource, found: Any) -> list[str]:
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise TypeError(f"the source {source!r} returned {type(found).__name__}; return a list of ids")
    ids = list(found)
    for id in ids:
        if not isinstance(id, str):
            raise TypeError(f"the source {source!r} returned the id {id!r}; ids are str, as they were added")
    return ids
