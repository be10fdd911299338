"""MillpondSimilarityRanker: Haystack's ranker over a millpond engine in this process."""

from __future__ import annotations

from typing import Any

from haystack import Document, component

from haystack_integrations.components.embedders.millpond.component import engine_options
from haystack_integrations.components.rankers.millpond.ranking import RankerComponent, checked_count
from millpond.compat.composed import Scorer


@component
class MillpondSimilarityRanker(RankerComponent):
    """Sorts documents by relevance to a query, best first, by a model that runs in this process.

    A cross-encoder (also an LLM reranker in its own template) and a late-interaction checkpoint score as they were
    trained to; an embedder scores by MaxSim over its token states. Documents passed in are not changed; of equal ids
    the one with the highest score is ranked. Without documents no model is loaded.

    The options of ``SentenceTransformersSimilarityRanker`` are translated, or refused. The other options: the fields of
    :class:`millpond.compat.adapter.RankerSource` and the class that it derives from, as ``method`` and ``engine``.

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
            "top_k": checked_count("top_k", top_k),
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
