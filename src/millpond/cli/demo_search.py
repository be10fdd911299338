"""What the demo does with one question: two databases, two stages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from millpond.ingest.search import Hit

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

CANDIDATES = 30
"""Passages that the databases hand on to the rerank."""

COARSE, FULL = 128, 384


class Searchable(Protocol):
    """A sink that can be asked."""

    def search(self, engine: Engine, question: str, *, k: int = 10, funnel: bool = True) -> list[Hit]:
        """The ``k`` records nearest to the question, best first."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A passage that answers a question.

    Attributes:
        name: Dotted name of what it documents.
        summary: Its first line.
        score: MaxSim, the sum over the question's tokens of their best cosine in the passage.
        place: Where the search had it, from 1.
    """

    name: str
    summary: str
    score: float
    place: int


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A question with its best answers.

    Attributes:
        question: The question.
        answers: The best passages, best first.
        found: How many different passages the databases handed on.
        shared: How many of these came from every database.
        seconds: What each database took.
        rerank_seconds: What the rerank took.
    """

    question: str
    answers: Sequence[Answer]
    found: int
    shared: int
    seconds: Mapping[str, float]
    rerank_seconds: float


def answer(engine: Engine, databases: Mapping[str, Searchable], question: str, *, k: int) -> Answered:
    """Ask every database, then order what they found by MaxSim over normalized token states."""
    from millpond.late_interaction.similarity import maxsim

    hits: dict[str, tuple[int, Hit]] = {}
    seconds: dict[str, float] = {}
    shared: set[str] | None = None
    for name, database in databases.items():
        start = time.perf_counter()
        found = database.search(engine, question, k=CANDIDATES, funnel=True)
        seconds[name] = time.perf_counter() - start
        for place, hit in enumerate(found, start=1):
            hits.setdefault(hit.id, (place, hit))
        ids = {hit.id for hit in found}
        shared = ids if shared is None else shared & ids
    start = time.perf_counter()
    candidates = list(hits.values())
    asked = engine.token_embed([question], role="query", normalize=True).embeddings
    told = engine.token_embed([hit.text for _, hit in candidates], role="document", normalize=True).embeddings
    scores, indices = maxsim(asked, told, top_k=k)  # [1, k] each
    best = [(float(score), *candidates[index]) for score, index in zip(scores[0], indices[0].tolist(), strict=True)]
    return Answered(
        question=question,
        answers=[
            Answer(name=hit.id, summary=str(hit.metadata["summary"]), score=score, place=place)
            for score, place, hit in best
        ],
        found=len(candidates),
        shared=len(shared or ()),
        seconds=seconds,
        rerank_seconds=time.perf_counter() - start,
    )
