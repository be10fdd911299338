"""MillpondSimilarityRanker and MillpondLateInteractionRanker: Haystack's rankers over a millpond engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from haystack import Document, component

from haystack_integrations.components.embedders.millpond.component import (
    EngineComponent,
    engine_options,
    listed,
    texts_of,
)
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
        scored = [replace(self.documents[result.index], score=result.relevance_score) for result in ranked]
        return {"documents": [each for each in scored if self.threshold is None or _score(each) >= self.threshold]}


class RankerComponent(EngineComponent[Scorer]):
    """What the rankers have in common."""

    def _ranking(self, query: str, documents: list[Document], **given: Any) -> _Ranking:
        """The arguments of a run over those of the component; of equal ids, the document with the highest score."""
        if not isinstance(query, str):
            raise TypeError(f"query is of type {type(query).__name__}; pass one str")
        own = self._own | {name: value for name, value in given.items() if value is not None}
        top_k = _checked("top_k", own["top_k"])
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


@component
class MillpondSimilarityRanker(RankerComponent):
    """Sorts documents by relevance to a query, best first, by a model that runs in this process.

    A cross-encoder (also an LLM reranker in its own template) and a late-interaction checkpoint score as they were
    trained to; an embedder scores by MaxSim over its token states. Documents passed in are not changed; of equal ids
    the one with the highest score is ranked. Without documents no model is loaded.

    The options of ``SentenceTransformersSimilarityRanker`` are translated, or refused. The other options: the fields of
    :class:`millpond.compat.adapter.ScorerSource` and the class that it derives from, as ``method`` and ``engine``.

    Args:
        model: Hub id or local folder.
        top_k: How many of the best to keep; ``None`` keeps all.
        query_prefix: Put before the query.
        query_suffix: Put behind the query.
        document_prefix: Put before each document.
        document_suffix: Put behind each document.
        meta_fields_to_embed: Keys of the metadata that are read before the content.
        embedding_separator: What stands between them.
        scale_score: Of a cross-encoder: ``True`` gives scores from 0 to 1 (the sigmoid of its logits, unless the
            checkpoint has an activation of its own), ``False`` the logits, ``None`` what the checkpoint says.
        score_threshold: Keep only documents with at least this score.
        **options: The other fields of the source.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        top_k: int | None = 10,
        query_prefix: str = "",
        query_suffix: str = "",
        document_prefix: str = "",
        document_suffix: str = "",
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
        scale_score: bool | None = True,
        score_threshold: float | None = None,
        **options: Any,
    ) -> None:
        self._source = Scorer(model=model, **engine_options(options))
        self._own = {
            "top_k": _checked("top_k", top_k),
            "query_prefix": query_prefix,
            "query_suffix": query_suffix,
            "document_prefix": document_prefix,
            "document_suffix": document_suffix,
            "meta_fields_to_embed": list(meta_fields_to_embed or ()),
            "embedding_separator": embedding_separator,
            "scale_score": scale_score,
            "score_threshold": score_threshold,
        }

    @component.output_types(documents=list[Document])
    def run(
        self,
        query: str,
        documents: list[Document],
        top_k: int | None = None,
        scale_score: bool | None = None,
        score_threshold: float | None = None,
    ) -> dict[str, Any]:
        """The best documents, best first.

        Args:
            query: The query.
            documents: The retrieved documents.
            top_k: Instead of that of the component.
            scale_score: Instead of that of the component.
            score_threshold: Instead of that of the component.

        Returns:
            ``documents``, copies with their scores.
        """
        given = {"top_k": top_k, "scale_score": scale_score, "score_threshold": score_threshold}
        return self._rank(self._ranking(query, documents, **given))

    @component.output_types(documents=list[Document])
    async def run_async(
        self,
        query: str,
        documents: list[Document],
        top_k: int | None = None,
        scale_score: bool | None = None,
        score_threshold: float | None = None,
    ) -> dict[str, Any]:
        """As :meth:`run`; cancelling the task drops the pairs still queued."""
        given = {"top_k": top_k, "scale_score": scale_score, "score_threshold": score_threshold}
        return await self._arank(self._ranking(query, documents, **given))


@component
class MillpondLateInteractionRanker(RankerComponent):
    """Sorts documents by MaxSim: each token of the query looks for its best match in a document.

    The model is a ColBERT, or any embedder, whose token states are compared. A score is a sum over the tokens of the
    query. Documents are treated as by :class:`MillpondSimilarityRanker`.

    The other options: the fields of :class:`millpond.compat.adapter.ScorerSource` but ``method``.

    Args:
        model: Hub id or local folder.
        top_k: How many of the best to keep; ``None`` keeps all.
        meta_fields_to_embed: Keys of the metadata that are read before the content.
        embedding_separator: What stands between them.
        score_threshold: Keep only documents with at least this score.
        **options: The other fields of the source.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        top_k: int | None = 10,
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
        score_threshold: float | None = None,
        **options: Any,
    ) -> None:
        if options.setdefault("method", "maxsim") != "maxsim":
            raise ValueError(f"method={options['method']!r} is not late interaction; use MillpondSimilarityRanker")
        self._source = Scorer(model=model, **engine_options(options))
        self._own = {
            "top_k": _checked("top_k", top_k),
            "meta_fields_to_embed": list(meta_fields_to_embed or ()),
            "embedding_separator": embedding_separator,
            "score_threshold": score_threshold,
        }

    @component.output_types(documents=list[Document])
    def run(
        self,
        query: str,
        documents: list[Document],
        top_k: int | None = None,
        score_threshold: float | None = None,
    ) -> dict[str, Any]:
        """The best documents, best first; the arguments are those of :class:`MillpondSimilarityRanker`."""
        return self._rank(self._ranking(query, documents, top_k=top_k, score_threshold=score_threshold))

    @component.output_types(documents=list[Document])
    async def run_async(
        self,
        query: str,
        documents: list[Document],
        top_k: int | None = None,
        score_threshold: float | None = None,
    ) -> dict[str, Any]:
        """As :meth:`run`; cancelling the task drops the pairs still queued."""
        return await self._arank(self._ranking(query, documents, top_k=top_k, score_threshold=score_threshold))


def _score(document: Document) -> float:
    return -math.inf if document.score is None else float(document.score)


def _checked(name: str, count: object) -> int | None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"{name}={count!r} must be an int from 1, or None for all")
    return count
