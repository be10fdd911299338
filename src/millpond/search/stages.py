"""The stages of a search: the database's, a reranker's, one hit of each record, a threshold."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record
from millpond.ingest.sinks.parents import Expand, with_parents
from millpond.search.stored_model import DescribedModel, describe_named, describe_stored, placement
from millpond.tasks import ScoreMethod

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.search import Hit

# Hits that the search hands to the next stage: at least so many, and so many for each that is kept.
_CANDIDATES, _CANDIDATES_PER_HIT = 50, 5
SELF = "self"
"""The name of a reranker that is the model of the collection itself."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What the stages of a search are, and which records they keep."""

    k: int = 10  # most records
    threshold: float | None = None  # least score of a record
    per_record: bool = False  # a record of several chunks once, by its best chunk
    expand: Expand | None = None  # `parent`: as `per_record`, with the text of the whole record
    coarse_to_fine: bool | None = None  # candidates by the smallest width, scored by the largest; `None`: as the sink
    hybrid: bool | None = None  # fused with the ranking of sparse vectors; `None`: if the collection has them
    rerank: str | None = None  # the model of a second stage, or SELF
    candidates: int | None = None  # results that the stage before the last keeps
    method: ScoreMethod = "auto"  # how the second stage scores
    instruction: str | None = None  # of an LLM reranker
    budget_ms: float | None = None  # most milliseconds of the second stage; the search's best hits come first
    model: str | None = None  # the model of the collection, if it is elsewhere now
    sparse_model: str | None = None  # that of its sparse vectors


@dataclass(frozen=True, kw_only=True)
class RankedHit:
    """A hit of the last stage."""

    hit: Hit  # what the database found, with the score of the search
    score: float  # the score by which it is ranked: the reranker's (NaN: no time for it), or that of the search
    retrieval_rank: int  # its rank in the search, from 1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The hits of one question."""

    query_id: str  # id of the question: its number, or that of a file
    query: str
    hits: Sequence[RankedHit]  # best first
    reranked: bool  # whether there was a second stage
    seconds: float  # time of all stages
    best: float | None = None  # the best score, also of a hit that the threshold refused; `None` if nothing matched


@dataclass(frozen=True, kw_only=True)
class SearchStages:
    """The stages of a search, for one question after the other."""

    sink: CollectionSink[Any]
    plan: StagePlan
    engine: Engine
    sparse_engine: Engine | None
    rerank_engine: Engine | None
    hybrid: bool
    filter: Mapping[str, Any] | None

    @classmethod
    def open(
        cls,
        sink: CollectionSink[Any],
        *,
        plan: StagePlan,
        settings: Mapping[str, Any],
        load: Callable[[DescribedModel], Engine],
        filter: Mapping[str, Any] | None = None,
    ) -> SearchStages:
        """Check the models of all stages, then load them: weights are the slowest step.

        Args:
            sink: The collection.
            plan: The stages.
            settings: The arguments of the collection's engine that are not those of then.
            load: Makes the engine of a model.
            filter: What the metadata of a hit must match.
        """
        manifest = sink.open()
        manifest.widths_to_search(sink.dimensions, collection=sink.collection)
        fused = sink.fusible if plan.hybrid is None else plan.hybrid
        describe = partial(describe_stored, owner="The collection")
        dense = describe(manifest.identity, plan.model, settings, option="--model")
        for identity in sink.former() if dense.spec.fingerprint != manifest.fingerprint else ():
            other = describe(identity, plan.model, settings, option="--model")
            if other.spec.fingerprint == identity.fingerprint:  # of the collection that does not serve
                dense = other
        sink.check_searches(dense.spec)
        sparse = second = None
        if fused and manifest.sparse is not None and manifest.sparse.fingerprint != dense.spec.fingerprint:
            option = "--sparse-model, or leave --hybrid out"
            sparse = describe(manifest.sparse, plan.sparse_model, placement(settings), option=option)
            manifest.check_sparse(sparse.spec, collection=sink.collection)
        if plan.rerank is not None and plan.rerank not in (SELF, dense.spec.name):
            second = describe_named(plan.rerank, placement(settings))
        engine = load(dense)
        reranker = None if plan.rerank is None else engine
        return cls(
            sink=sink,
            plan=plan,
            engine=engine,
            sparse_engine=None if sparse is None else load(sparse),
            rerank_engine=reranker if second is None else load(second),
            hybrid=fused,
            filter=filter,
        )

    def answer(self, question: Record) -> Answer:
        """All stages for one question."""
        start = time.perf_counter()
        plan = self.plan
        ranked = rank_again(self.rerank_engine, question.text, self._retrieve(question.text), plan)
        if plan.per_record or plan.expand is not None:
            best: dict[str, RankedHit] = {}
            for each in ranked:
                best.setdefault(each.hit.id, each)
            ranked = list(best.values())
        if plan.expand is not None and self.rerank_engine is not None:  # else the search did it
            hits = with_parents(self.sink, [each.hit for each in ranked[: plan.k]])
            ranked = [replace(each, hit=hit) for each, hit in zip(ranked, hits, strict=False)]
        lowest = plan.threshold
        return Answer(
            query_id=question.id,
            query=question.text,
            hits=[each for each in ranked[: plan.k] if lowest is None or each.score >= lowest],
            reranked=self.rerank_engine is not None,
            seconds=time.perf_counter() - start,
            best=ranked[0].score if ranked else None,
        )

    def _retrieve(self, question: str) -> list[Hit]:
        per_record = self.plan.per_record and self.plan.expand is None
        staged = self.rerank_engine is not None or per_record
        k, candidates, limit = self.plan.k, self.plan.candidates, self.sink.max_results
        if candidates is not None and limit is not None and candidates > limit and staged:
            raise InvalidRequestError(
                f"candidates={candidates} is more than {self.sink.database} hands out ({limit}); ask for fewer"
            )
        fetched = candidates_of(self.plan)
        if candidates is None and limit is not None:
            fetched = max(k, min(fetched, limit))
        return self.sink.search(
            self.engine,
            question,
            k=fetched if staged else k,
            coarse_to_fine=self.plan.coarse_to_fine,
            candidates=None if staged else candidates,
            filter=self.filter,
            hybrid=self.hybrid,
            sparse_engine=self.sparse_engine,
            expand=None if self.rerank_engine is not None else self.plan.expand,
        )


def candidates_of(plan: StagePlan) -> int:
    """How many hits the stage before the last keeps."""
    return plan.candidates or max(_CANDIDATES, _CANDIDATES_PER_HIT * plan.k)


def rank_again(engine: Engine | None, question: str, hits: Sequence[Hit], plan: StagePlan) -> list[RankedHit]:
    """The hits by the score of a second stage, best first; without its engine as they are."""
    if engine is None or not hits:
        return [RankedHit(hit=hit, score=hit.score, retrieval_rank=rank) for rank, hit in enumerate(hits, start=1)]
    log = logging.getLogger("millpond.engine.schedule.truncation")
    log.disabled, before = True, log.disabled  # whoever stored the texts was told so, and of the same ones
    try:
        results = engine.rerank(
            question,
            [hit.text for hit in hits],
            method=plan.method,
            instruction=plan.instruction,
            **_limits(hits, plan),
        )
    finally:
        log.disabled = before
    return [
        RankedHit(hit=hits[each.index], score=each.relevance_score, retrieval_rank=each.index + 1) for each in results
    ]


def _limits(hits: Sequence[Hit], plan: StagePlan) -> dict[str, Any]:
    """What ends a second stage before it has scored every hit, and in which order it scores them."""
    if plan.budget_ms is None:
        return {}
    whole = plan.per_record or plan.expand is not None  # then nobody knows how many hits make `k` records
    top_n = len(hits) if whole else min(plan.k, len(hits))
    return {"budget_ms": plan.budget_ms, "top_n": top_n, "first_scores": [hit.score for hit in hits]}
