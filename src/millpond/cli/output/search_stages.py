"""The stages of a search: the database's, a reranker's, one hit of each record, a threshold."""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.groups import EngineOptions
from millpond.cli.arguments.options import option
from millpond.cli.arguments.stored_model import DescribedModel, describe_named, describe_stored
from millpond.cli.output.results_table import Answer, RankedHit, score_name
from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record
from millpond.values.fingerprint import stored_name

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.search import Hit

logger = logging.getLogger(__name__)

# Hits that the search hands to the next stage: at least so many, and so many for each that is printed.
_CANDIDATES, _CANDIDATES_PER_HIT = 50, 5
SELF = "self"
"""The value of ``--rerank`` that names the model of the collection itself."""


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """What the stages of a search are, and which records are printed."""

    k: options.K = 10
    threshold: float | None = option(None, "Print records of at least this score.", "SCORE")
    per_record: bool = option(False, "Print a record of several chunks once, by its best chunk.", flags="--per-record")
    coarse_to_fine: bool = option(
        True,
        "Find candidates by the smallest width and score them by the largest, or search that one alone.",
        flags="--coarse-to-fine/--no-coarse-to-fine",
    )
    hybrid: bool | None = option(
        None,
        "Fuse the ranking with that of sparse vectors (default: if the collection has them).",
        flags="--hybrid/--no-hybrid",
    )
    rerank: str | None = option(
        None,
        "Score what is found again: by a cross-encoder, an LLM reranker or a ColBERT checkpoint, or, as 'self', by the "
        "token vectors of the collection's model.",
        "MODEL",
    )
    candidates: int | None = option(
        None,
        "Results that the stage before the last keeps.",
        "N",
        min=1,
        show_default="coarse to fine 10 k, at least 100; for --rerank 5 k, at least 50",
    )
    method: options.Method = "auto"
    instruction: options.Instruction = None
    model: options.StoredModel = None
    sparse_model: options.SparseModel = None

    def check(self) -> None:
        """Refuse options that contradict each other, before anything is opened."""
        if self.candidates is not None and self.candidates < self.k:
            raise typer.BadParameter(f"{self.candidates} is less than --k {self.k}", param_hint="--candidates")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise typer.BadParameter(f"{self.threshold} is not a score", param_hint="--threshold")
        if self.rerank is not None and not self.rerank.strip():
            raise typer.BadParameter("it is blank; name a model, or write self", param_hint="--rerank")
        for name, given in (("--method", self.method != "auto"), ("--instruction", self.instruction is not None)):
            if given and self.rerank is None:
                raise typer.BadParameter("it is an option of the second stage; name --rerank, too", param_hint=name)


@dataclass(frozen=True, kw_only=True)
class SearchStages:
    """The stages of a search, for one question after the other."""

    sink: CollectionSink[Any]
    options: StageOptions
    engine: Engine
    sparse_engine: Engine | None
    rerank_engine: Engine | None
    hybrid: bool
    filter: dict[str, Any] | None

    @classmethod
    def open(
        cls,
        stack: ExitStack,
        sink: CollectionSink[Any],
        *,
        options: StageOptions,
        engine_options: EngineOptions,
        filter: dict[str, Any] | None,
    ) -> SearchStages:
        """Check the models of all stages, then load them: weights are the slowest step."""
        manifest = sink.open()
        manifest.widths_to_search(sink.dimensions, collection=sink.collection)
        fused = sink.fusible if options.hybrid is None else options.hybrid
        describe = partial(describe_stored, owner="The collection")
        dense = describe(manifest.identity, options.model, engine_options.settings, option="--model")
        manifest.check_model(dense.spec, collection=sink.collection)
        sparse = second = None
        placement = engine_options.placement
        if fused and manifest.sparse is not None and manifest.sparse.fingerprint != dense.spec.fingerprint:
            option = "--sparse-model, or leave --hybrid out"
            sparse = describe(manifest.sparse, options.sparse_model, placement, option=option)
            manifest.check_sparse(sparse.spec, collection=sink.collection)
        if options.rerank is not None and options.rerank not in (SELF, dense.spec.name):
            second = describe_named(options.rerank, placement)

        from millpond.engine.engine import Engine

        def load(model: DescribedModel) -> Engine:
            return stack.enter_context(Engine(model.spec.name, **model.settings))

        engine = load(dense)
        reranker = None if options.rerank is None else engine
        return cls(
            sink=sink,
            options=options,
            engine=engine,
            sparse_engine=None if sparse is None else load(sparse),
            rerank_engine=reranker if second is None else load(second),
            hybrid=fused,
            filter=filter,
        )

    def answer(self, question: Record) -> Answer:
        """All stages for one question."""
        start = time.perf_counter()
        hits = self._retrieve(question.text)
        ranked = [RankedHit(hit=hit, score=hit.score, retrieval_rank=rank) for rank, hit in enumerate(hits, start=1)]
        if self.rerank_engine is not None and hits:
            texts, method, instruction = [hit.text for hit in hits], self.options.method, self.options.instruction
            log = logging.getLogger("millpond.engine.schedule.truncation")
            log.disabled, before = True, log.disabled  # ingest has said so, and of the same texts
            try:
                results = self.rerank_engine.rerank(question.text, texts, method=method, instruction=instruction)
            finally:
                log.disabled = before
            ranked = [
                RankedHit(hit=hits[each.index], score=each.relevance_score, retrieval_rank=each.index + 1)
                for each in results
            ]
        if self.options.per_record:
            best: dict[str, RankedHit] = {}
            for each in ranked:
                best.setdefault(each.hit.id, each)
            ranked = list(best.values())
        lowest = self.options.threshold
        kept = [each for each in ranked[: self.options.k] if lowest is None or each.score >= lowest]
        if not kept:
            logger.warning("%s", self._why_none(question, ranked))
        return Answer(
            query_id=question.id,
            query=question.text,
            hits=kept,
            reranked=self.rerank_engine is not None,
            seconds=time.perf_counter() - start,
        )

    @property
    def title(self) -> str:
        """What ranks the hits, for people."""
        manifest = self.sink.open()
        widths = self.sink.dimensions or manifest.dimensions
        shown = (
            f"{widths[0]}, then {widths[-1]}" if self.options.coarse_to_fine and len(widths) > 1 else str(widths[-1])
        )
        title = f"by {'the fused ranks of sparse vectors and ' if self.hybrid else ''}cosine at {shown}"
        title += f" ({manifest.model})"
        if self.rerank_engine is not None:
            spec = self.rerank_engine.spec
            title += f", then by {score_name(spec, self.options.method)} ({stored_name(spec)})"
        return title

    def _retrieve(self, question: str) -> list[Hit]:
        staged = self.rerank_engine is not None or self.options.per_record
        k, candidates, limit = self.options.k, self.options.candidates, self.sink.max_results
        if candidates is not None and limit is not None and candidates > limit and staged:
            raise InvalidRequestError(
                f"candidates={candidates} is more than {self.sink.database} hands out ({limit}); ask for fewer"
            )
        fetched = candidates or max(_CANDIDATES, _CANDIDATES_PER_HIT * k)
        if candidates is None and limit is not None:
            fetched = max(k, min(fetched, limit))
        return self.sink.search(
            self.engine,
            question,
            k=fetched if staged else k,
            coarse_to_fine=self.options.coarse_to_fine,
            candidates=None if staged else candidates,
            filter=self.filter,
            hybrid=self.hybrid,
            sparse_engine=self.sparse_engine,
        )

    def _why_none(self, question: Record, ranked: list[RankedHit]) -> str:
        """Why there is nothing to print."""
        where = f"question {question.id}: "
        if ranked:
            return f"{where}no score reaches --threshold {self.options.threshold:g}; the best is {ranked[0].score:.4g}"
        if self.filter:
            shown = json.dumps(self.filter, ensure_ascii=False)
            return f"{where}no record matches the filter {shown}; a number in quotes is a str, and matches no number"
        return f"{where}collection {self.sink.collection!r} is empty"
