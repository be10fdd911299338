"""Answer one question of the demo: search every database, then rerank the hits by MaxSim."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from millpond.ingest.sinks.search import Hit

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

CANDIDATES = 30
"""Number of passages that each database passes to the rerank."""

COARSE, FULL = 128, 384


class Searchable(Protocol):
    """A database that can be searched."""

    def search(self, engine: Engine, question: str, *, k: int = 10, coarse_to_fine: bool = True) -> list[Hit]:
        """Return the ``k`` records nearest to the question, best first."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A passage that answers a question.

    Attributes:
        name: Dotted name of the documented object.
        summary: First sentence of its docstring.
        score: MaxSim: for each token of the question its highest cosine with a token of the passage, summed.
        search_rank: Its rank in the search, from 1.
    """

    name: str
    summary: str
    score: float
    search_rank: int


@dataclass(frozen=True, kw_only=True)
class AnsweredQuestion:
    """A question with its best answers.

    Attributes:
        question: Text of the question.
        answers: The best passages, best first.
        candidates: Number of different passages found by the databases.
        shared: Number of these that every database found.
        seconds: Search time of each database.
        rerank_seconds: Time of the rerank.
    """

    question: str
    answers: Sequence[Answer]
    candidates: int
    shared: int
    seconds: Mapping[str, float]
    rerank_seconds: float


def answer(engine: Engine, databases: Mapping[str, Searchable], question: str, *, k: int) -> AnsweredQuestion:
    """Search every database, then rank the hits by MaxSim over normalized token states."""
    from millpond.late_interaction.scoring.similarity import maxsim

    hits: dict[str, tuple[int, Hit]] = {}  # id: (rank in the search, hit)
    seconds: dict[str, float] = {}
    shared: set[str] | None = None
    for name, database in databases.items():
        start = time.perf_counter()
        results = database.search(engine, question, k=CANDIDATES, coarse_to_fine=True)
        seconds[name] = time.perf_counter() - start
        for rank, hit in enumerate(results, start=1):
            hits.setdefault(hit.id, (rank, hit))
        ids = {hit.id for hit in results}
        shared = ids if shared is None else shared & ids
    start = time.perf_counter()
    candidates = list(hits.values())
    query = engine.token_embed([question], role="query", normalize=True).embeddings
    documents = engine.token_embed([hit.text for _, hit in candidates], role="document", normalize=True).embeddings
    scores, indices = maxsim(query, documents, top_k=k)  # [1, k] each
    best = [(float(score), *candidates[index]) for score, index in zip(scores[0], indices[0].tolist(), strict=True)]
    return AnsweredQuestion(
        question=question,
        answers=[
            Answer(name=hit.id, summary=str(hit.metadata["summary"]), score=score, search_rank=rank)
            for score, rank, hit in best
        ],
        candidates=len(candidates),
        shared=len(shared or ()),
        seconds=seconds,
        rerank_seconds=time.perf_counter() - start,
    )
