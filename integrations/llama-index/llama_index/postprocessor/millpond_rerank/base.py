"""MillpondRerank: LlamaIndex's node postprocessor over a millpond engine in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import llama_index.core.instrumentation as instrument
from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from pydantic import AliasChoices, Field

from llama_index.embeddings.millpond.source import LlamaIndexSource, listed
from millpond.compat.adapter import PathStr, RankerSource

if TYPE_CHECKING:
    from millpond import RerankOutput

_RETRIEVAL_SCORE = "retrieval_score"

dispatcher = instrument.get_dispatcher(__name__)  # type: ignore[attr-defined]  # LlamaIndex re-exports it


class MillpondRerank(LlamaIndexSource, RankerSource, BaseNodePostprocessor):
    """Sorts nodes by relevance to a query, best first, by a model that runs in this process.

    Cross-encoders (LLM rerankers with their own template) and late-interaction checkpoints score as they were trained
    to; an embedding checkpoint scores by MaxSim over its token states, so the model that retrieved can rerank too. The
    scale of the scores depends on the checkpoint and on ``method``: docs/engine.md has a table. It reads the same
    content of a node as an embedding model: its text, and its metadata except the keys that the node excludes.

    The scores replace those of the retrieval, in copies: nodes passed in are not changed. With ``model=``, the model
    is loaded on first use, and all objects of one configuration share one engine, also after pickling. The async method
    neither blocks the event loop nor occupies a thread.

    The options of ``SentenceTransformerRerank``, ``ColbertRerank`` and ``FlagEmbeddingReranker`` are translated into
    the fields, or refused. The other fields: :class:`millpond.compat.adapter.RankerSource` and the class that it
    derives from.

    Attributes:
        model: Hub id or local folder; also accepted, and readable, as ``model_name``. ``model`` and ``top_n`` may be
            positional, in this order or, with a number first, as ``SentenceTransformerRerank`` has them.
        top_n: How many of the best to keep; ``None`` keeps all.
        keep_retrieval_score: Store the score of the retrieval in ``node.metadata["retrieval_score"]``, in copies of the
            nodes; embedding models and language models do not see it.
    """

    model: PathStr | None = Field(default=None, validation_alias=AliasChoices("model", "model_name"), min_length=1)
    top_n: int | None = Field(default=3, gt=0, strict=True)
    keep_retrieval_score: bool = False

    def __init__(self, *positional: str | os.PathLike[str] | int, **options: Any) -> None:
        """From the fields, of which ``model`` and ``top_n`` may be positional.

        Args:
            *positional: The model's name and ``top_n``, in either order.
            **options: The fields.

        Raises:
            TypeError: More positional arguments, or one of them twice.
            ValueError: An unknown or invalid option.
        """
        # SentenceTransformerRerank, ColbertRerank and FlagEmbeddingReranker have top_n first.
        names = ("top_n", "model") if positional and isinstance(positional[0], int) else ("model", "top_n")
        super().__init__(**self._with_positional(positional, options, *names))

    @property
    def model_name(self) -> str | None:
        """``model``; with ``engine=``, that of the engine."""
        return self.engine.spec.name if self.engine is not None else self.model

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        nodes, query = listed(nodes, "postprocess_nodes", "nodes"), _query_of(query_bundle)
        with self._reported(nodes, query) as best:
            if nodes:
                best += self._scored(nodes, self._ranked(query.query_str, _texts_of(nodes), self.top_n))
        return best

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        nodes, query = listed(nodes, "apostprocess_nodes", "nodes"), _query_of(query_bundle)
        with self._reported(nodes, query) as best:
            if nodes:
                best += self._scored(nodes, await self._aranked(query.query_str, _texts_of(nodes), self.top_n))
        return best

    @contextmanager
    def _reported(self, nodes: list[NodeWithScore], query: QueryBundle) -> Iterator[list[NodeWithScore]]:
        """Emit LlamaIndex's events around the work, which fills the yielded list."""
        best: list[NodeWithScore] = []
        name = self.engine.spec.name if self.engine is not None else str(self.model)
        top_n = len(nodes) if self.top_n is None else self.top_n
        dispatcher.event(ReRankStartEvent(query=query, nodes=nodes, top_n=top_n, model_name=name))
        payload: dict[str, Any] = {
            EventPayload.NODES: nodes,
            EventPayload.MODEL_NAME: name,
            EventPayload.QUERY_STR: query.query_str,
            EventPayload.TOP_K: top_n,
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            yield best
            event.on_end(payload={EventPayload.NODES: best})
        dispatcher.event(ReRankEndEvent(nodes=best))

    def _scored(self, nodes: list[NodeWithScore], ranked: RerankOutput) -> list[NodeWithScore]:
        chosen = []
        for result in ranked:
            hit = nodes[result.index]
            node = hit.node
            if self.keep_retrieval_score:
                node = node.model_copy(
                    update={
                        "metadata": {**node.metadata, _RETRIEVAL_SCORE: hit.score},
                        "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, _RETRIEVAL_SCORE],
                        "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, _RETRIEVAL_SCORE],
                    }
                )
            chosen.append(hit.model_copy(update={"node": node, "score": result.score_or_none}))
        return chosen


def _query_of(query_bundle: QueryBundle | None) -> QueryBundle:
    if query_bundle is None:
        raise ValueError("MillpondRerank needs the query: postprocess_nodes(nodes, query_str=...)")
    return query_bundle


def _texts_of(nodes: list[NodeWithScore]) -> list[str]:
    return [hit.node.get_content(metadata_mode=MetadataMode.EMBED) for hit in nodes]
