"""MillpondSinkRetriever: LlamaIndex's retriever over a collection that millpond's ingest filled."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import MetadataFilters

from llama_index.retrievers.millpond.base import _conditions
from millpond import Engine
from millpond.ingest import CollectionSink, Hit, point_id


class MillpondSinkRetriever(BaseRetriever):
    """Retrieves the records of a collection in one search of its database, coarse to fine or hybrid.

    A node has the text and the metadata of a record, and its id; of a chunk the id of its row, with the record as its
    source document. The score is the cosine at the largest width, or of a hybrid search the fused score. The async
    methods do not block the event loop.

    Attributes:
        sink: The collection.
        engine: The engine that filled it.
        similarity_top_k: How many nodes to return.
    """

    def __init__(
        self,
        sink: CollectionSink[Any],
        engine: Engine,
        similarity_top_k: int = 4,
        *,
        filters: MetadataFilters | Mapping[str, Any] | None = None,
        coarse_to_fine: bool = True,
        candidates: int | None = None,
        hybrid: bool = False,
        sparse_engine: Engine | None = None,
        expand: Literal["parent"] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        """Over a collection.

        Args:
            sink: A ``QdrantSink``, ``MilvusSink`` or any other of ``open_sink(url)``.
            engine: The engine that filled the collection.
            similarity_top_k: How many nodes to return.
            filters: A dict of metadata values, lists of which one must match, and ranges, or LlamaIndex's filters with
                the operators ``==``, ``in``, ``any``, ``>``, ``>=``, ``<`` and ``<=`` that all must hold.
            coarse_to_fine: Search in two stages, if the collection has several widths.
            candidates: How many records the first stage selects, ``max(100, 10 * similarity_top_k)`` by default.
            hybrid: Fuse the ranking with that of the sparse vectors.
            sparse_engine: The engine of the sparse vectors, by default ``engine``.
            expand: ``"parent"`` returns whole records in place of chunks, each once, with the text of all of its chunks
                and the metadata of the best one, which is ``text[chunk_start:chunk_end]``.
            callback_manager: As of every retriever.

        Raises:
            TypeError: ``sink`` is no sink that searches.
            ValueError: A filter that a collection does not have.
        """
        if not isinstance(sink, CollectionSink):
            raise TypeError(
                f"sink is of type {type(sink).__name__}; pass a QdrantSink, a MilvusSink or another sink that "
                "searches, as open_sink(url) opens it"
            )
        self.sink = sink
        self.engine = engine
        self.similarity_top_k = similarity_top_k
        self._options: dict[str, Any] = {
            "filter": _conditions(filters),
            "coarse_to_fine": coarse_to_fine,
            "candidates": candidates,
            "hybrid": hybrid,
            "sparse_engine": sparse_engine,
            "expand": expand,
        }
        super().__init__(callback_manager=callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits = self.sink.search(self.engine, query_bundle.query_str, k=self.similarity_top_k, **self._options)
        return [NodeWithScore(node=self._node(hit), score=hit.score) for hit in hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)

    def _node(self, hit: Hit) -> TextNode:
        metadata = deepcopy(dict(hit.metadata))
        number, start, end = (metadata.get(key) for key in ("chunk", "chunk_start", "chunk_end"))
        if self._options["expand"] is not None or not (type(number) is type(start) is type(end) is int):
            return TextNode(id_=hit.id, text=hit.text, metadata=metadata)
        return TextNode(
            id_=point_id(hit.id, number),
            text=hit.text,
            metadata=metadata,
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=hit.id)},
            start_char_idx=start,
            end_char_idx=end,
        )
