"""The stages of a search: the database's, a reranker's, one hit of each record, a threshold."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millpond.cli.output.results_table import SCORE_NAMES, Answer, RankedHit
from millpond.errors import InvalidRequestError
from millpond.fingerprint import stored_name
from millpond.ingest.record import Record
from millpond.tasks import ScoreMethod

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.search import Hit

logger = logging.getLogger(__name__)

# Hits that the search hands to the next stage: at least so many, and so many for each that is printed.
_CANDIDATES, _CANDIDATES_PER_HIT = 50, 5


@dataclass(frozen=True, kw_only=True)
class SearchStages:
    """The stages of a search, for one question after the other."""

    sink: CollectionSink[Any]
    engine: Engine
    sparse_engine: Engine | None
    rerank_engine: Engine | None
    hybrid: bool
    coarse_to_fine: bool
    filter: dict[str, Any] | None
    k: int
    candidates: int | None
    per_record: bool
    threshold: float | None
    method: ScoreMethod
    instruction: str | None

    def answer(self, question: Record) -> Answer:
        """All stages for one question.

        Raises:
            InvalidRequestError: A question without a direction, or an option that the database or a model refuses.
            SinkError: The database does not answer, or refuses.
        """
        start = time.perf_counter()
        hits = self._retrieve(question.text)
        ranked = [RankedHit(hit=hit, score=hit.score, retrieval_rank=rank) for rank, hit in enumerate(hits, start=1)]
        if self.rerank_engine is not None and hits:
            texts = [hit.text for hit in hits]
            with _quiet("millpond.engine.schedule.truncation"):  # ingest has said so, and of the same texts
                results = self.rerank_engine.rerank(
                    question.text, texts, method=self.method, instruction=self.instruction
                )
            ranked = [
                RankedHit(hit=hits[each.index], score=each.relevance_score, retrieval_rank=each.index + 1)
                for each in results
            ]
        if self.per_record:
            best: dict[str, RankedHit] = {}
            for each in ranked:
                best.setdefault(each.hit.id, each)
            ranked = list(best.values())
        kept = [each for each in ranked[: self.k] if self.threshold is None or each.score >= self.threshold]
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
        shown = f"{widths[0]}, then {widths[-1]}" if self.coarse_to_fine and len(widths) > 1 else str(widths[-1])
        title = f"by {'the fused ranks of sparse vectors and ' if self.hybrid else ''}cosine at {shown}"
        title += f" ({manifest.model})"
        if self.rerank_engine is not None:
            spec = self.rerank_engine.spec
            score = SCORE_NAMES.get((spec.rerank_type or "") if self.method == "auto" else self.method, "score")
            title += f", then by {score} ({stored_name(spec)})"
        return title

    def _retrieve(self, question: str, **changes: Any) -> list[Hit]:
        staged = self.rerank_engine is not None or self.per_record
        limit = self.sink.max_results
        if self.candidates is not None:
            fetched = self.candidates
            if limit is not None and fetched > limit:
                raise InvalidRequestError(
                    f"candidates={fetched} is more than {self.sink.database} hands out ({limit}); ask for fewer"
                )
        else:
            fetched = max(_CANDIDATES, _CANDIDATES_PER_HIT * self.k)
            if limit is not None:
                fetched = max(self.k, min(fetched, limit))
        arguments: dict[str, Any] = {
            "k": fetched if staged else self.k,
            "coarse_to_fine": self.coarse_to_fine,
            "candidates": None if staged else self.candidates,
            "filter": self.filter,
            "hybrid": self.hybrid,
            "sparse_engine": self.sparse_engine,
        }
        return self.sink.search(self.engine, question, **{**arguments, **changes})

    def _why_none(self, question: Record, ranked: list[RankedHit]) -> str:
        """Why there is nothing to print, and what there is."""
        where = f"question {question.id}: "
        if ranked:
            return f"{where}no score reaches --threshold {self.threshold:g}; the best is {ranked[0].score:.4g}"
        nearest = self._retrieve(question.text, k=1, candidates=None, filter=None) if self.filter else []
        if not nearest:
            return f"{where}collection {self.sink.collection!r} is empty"
        metadata = nearest[0].metadata
        stored = {key: metadata[key] for key in self.filter or () if key in metadata}
        shown = f"has {_shown(stored)}" if stored else f"has {_shown(metadata) or 'no metadata'}"
        return f"{where}no record matches the filter {_shown(self.filter or {})}; the nearest one {shown}"


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Drop the warnings of a logger."""
    log = logging.getLogger(name)
    log.disabled, before = True, log.disabled
    try:
        yield
    finally:
        log.disabled = before


def _shown(metadata: Mapping[str, Any]) -> str:
    """Metadata as ``--filter`` takes it, with the quotes of each str."""
    text = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in metadata.items())
    return text if len(text) <= 300 else f"{text[:299]}…"
