"""MillpondLateInteractionRanker: Haystack's ranker by token vectors over a millpond engine in this process."""

from __future__ import annotations

from typing import Any

from haystack import Document, component

from haystack_integrations.components.embedders.millpond.component import engine_options
from haystack_integrations.components.rankers.millpond.ranking import RankerComponent, checked_count
from millpond.compat.composed import Scorer


@component
class MillpondLateInteractionRanker(RankerComponent):
    """Sorts documents by MaxSim: each token of the query looks for its best match in a document.

    The model is a ColBERT, or any embedder, whose token states are compared. A score is a sum over the tokens of the
    query. Documents are treated as by ``MillpondSimilarityRanker``.

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
            "top_k": checked_count("top_k", top_k),
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
        """The best documents, best first; the arguments are those of ``MillpondSimilarityRanker``."""
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
