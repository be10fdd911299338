"""RankerComponent: what the rankers have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from haystack import Document

from haystack_integrations.components.embedders.millpond.component import EngineComponent, listed, texts_of
from millpond.compat.composed import Scorer

if TYPE_CHECKING:
    from millpond import RerankOutput


@dataclass(frozen=True, kw_only=True)
class _Ranking:
    """What is ranked, and what is kept of it."""

    query: str
    documents: list[Document]
    texts: list[str]
    top_k: int | None
    threshold: float | None
    scaled: bool | None

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the source."""
        return {"query": self.query, "texts": self.texts, "top_n": self.top_k, "scaled": self.scaled}

    def best(self, ranked: RerankOutput | tuple[()]) -> dict[str, Any]:
        """Copies of the documents with their scores, best first."""
        scored = [replace(self.documents[result.index], score=result.score_or_none) for result in ranked]
        return {"documents": [each for each in scored if self.threshold is None or _score(each) >= self.threshold]}


class RankerComponent(EngineComponent[Scorer]):
    """What the rankers have in common."""

    def _ranking(self, query: str, documents: list[Document], **given: Any) -> _Ranking:
        """The arguments of a run over those of the component; of equal ids, the document with the highest score."""
        if not isinstance(query, str):
            raise TypeError(f"query is of type {type(query).__name__}; pass one str")
        own = self._own | {name: value for name, value in given.items() if value is not None}
        top_k = checked_count("top_k", own["top_k"])
        chosen: dict[str, Document] = {}
        for document in listed(documents, type(self).__name__):
            known = chosen.get(document.id)
            if known is None or _score(document) > _score(known):
                chosen[document.id] = document
        kept = list(chosen.values())
        around = [own.get(name, "") for name in ("document_prefix", "document_suffix")]
        texts = texts_of(kept, own["meta_fields_to_embed"], own["embedding_separator"])
        return _Ranking(
            query=own.get("query_prefix", "") + query + own.get("query_suffix", ""),
            documents=kept,
            texts=[text.join(around) for text in texts],
            top_k=top_k,
            threshold=own["score_threshold"],
            scaled=own.get("scale_score"),
        )

    def _rank(self, ranking: _Ranking) -> dict[str, Any]:
        return ranking.best(self._source.rank(**ranking.call) if ranking.texts else ())

    async def _arank(self, ranking: _Ranking) -> dict[str, Any]:
        return ranking.best(await self._source.arank(**ranking.call) if ranking.texts else ())


def _score(document: Document) -> float:
    return -math.inf if document.score is None else float(document.score)


def checked_count(name: str, count: object) -> int | None:
    """A number of documents from 1, or ``None`` for all."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"{name}={count!r} must be an int from 1, or None for all")
    return count
