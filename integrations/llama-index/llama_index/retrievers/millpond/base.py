"""MillpondColBERTRetriever: LlamaIndex's retriever over a late-interaction index in this process or a database."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, TypedDict, Unpack

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import BaseNode, IndexNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from llama_index.embeddings.millpond.source import listed
from millpond.late_interaction import Hit, LateInteractionIndex
from millpond.late_interaction.retrieval import aretrieve, retrieve

_SPANS = "spans"
_BOUNDS = {FilterOperator.GT: "gt", FilterOperator.GTE: "gte", FilterOperator.LT: "lt", FilterOperator.LTE: "lte"}


class RetrieverOptions(TypedDict, total=False):
    """Options of a :class:`MillpondColBERTRetriever` that are rarely needed.

    Attributes:
        candidates: Documents that are scored exactly; the index's own number by default, with ``sources``
            ``max(100, 10 * similarity_top_k)``.
        exact: Score every document, without a first stage.
        callback_manager: As of every retriever; so are the others.
    """

    candidates: int | None
    exact: bool
    callback_manager: CallbackManager | None
    object_map: dict[str, Any] | None
    objects: list[IndexNode] | None
    verbose: bool


class MillpondColBERTRetriever(BaseRetriever):
    """Retrieves nodes by late interaction: MaxSim over the token vectors of query and node.

    Nodes that :meth:`add_nodes` added come back with their ids, relationships and metadata; a document that was added
    to the index otherwise comes back as a ``TextNode`` with its id, text and metadata. Their score is MaxSim.

    With ``sources``, candidates come from several searches, are fused by reciprocal rank fusion, and the index scores
    them: for example ``sources=["index", bm25_retriever]``.

    Attributes:
        index: The index.
        similarity_top_k: How many nodes to return.
    """

    def __init__(
        self,
        index: LateInteractionIndex,
        similarity_top_k: int = 4,
        *,
        filters: MetadataFilters | Mapping[str, Any] | None = None,
        sources: Sequence[Any] | None = None,
        weights: Sequence[float] | None = None,
        include_spans: bool = False,
        **options: Unpack[RetrieverOptions],
    ) -> None:
        """Over an index.

        Args:
            index: A ``MemoryIndex``, ``PlaidIndex``, ``QdrantIndex`` or ``MilvusIndex``.
            similarity_top_k: How many nodes to return.
            filters: A dict of metadata values, lists of which one must match, and ranges, or LlamaIndex's filters with
                the operators ``==``, ``in``, ``any``, ``>``, ``>=``, ``<`` and ``<=`` that all must hold.
            sources: Where candidates come from: ``"index"``, ``"exact"``, a retriever (its nodes must have the ids of
                the index), or a function ``(query, limit)`` that returns ids, best first.
            weights: A weight for each source.
            include_spans: Add ``metadata["spans"]``: for each token of the query ``token``, ``score``, ``start``,
                ``end`` and ``text`` of its best match, as positions in the node's text; ``start`` and ``end`` are
                ``None`` where the match is in metadata, which is read before the text. The nodes returned are encoded
                again for it.
            **options: :class:`RetrieverOptions`.

        Raises:
            TypeError: ``index`` is of another kind, or an unknown option.
            ValueError: A filter that the index does not have.
        """
        for name, value in options.items():
            if name not in RetrieverOptions.__annotations__:
                raise TypeError(
                    f"{name}={value!r} is not an option of MillpondColBERTRetriever: the index holds the model, as in "
                    "MillpondColBERTRetriever(MemoryIndex(Engine('...'))), and similarity_top_k= is the number of nodes"
                )
        if not isinstance(index, LateInteractionIndex):
            raise TypeError(
                f"index is of type {type(index).__name__}; pass a MemoryIndex, a PlaidIndex, a QdrantIndex or a "
                "MilvusIndex, for example MillpondColBERTRetriever(MemoryIndex(Engine('...')))"
            )
        self.index = index
        self.similarity_top_k = similarity_top_k
        self._sources = sources
        self._include_spans = include_spans
        framework: dict[str, Any] = {**options}
        self._options: dict[str, Any] = {
            "filter": _conditions(filters),
            "candidates": framework.pop("candidates", None),
            "exact": framework.pop("exact", False),
            "weights": weights,
        }
        super().__init__(**framework)

    @property
    def model(self) -> str | None:
        """The name of the model of the index; ``None`` of an index that was given embeddings only."""
        engine = self.index.engine
        return None if engine is None else engine.spec.name

    @property
    def model_name(self) -> str | None:
        """``model``."""
        return self.model

    def add_nodes(self, nodes: Sequence[BaseNode], *, show_progress: bool = False) -> list[str]:
        """Add nodes to the index; those of equal ids are replaced. The nodes are not changed.

        The index reads what an embedding model would: the text, and metadata without the keys that a node excludes.
        The object of an ``IndexNode`` (a retriever, a query engine or a node) is not stored: this retriever keeps it in
        ``object_map``, and another one over the same index needs ``objects=``.

        Args:
            nodes: Nodes with text.
            show_progress: Draw a bar in a terminal or notebook.

        Returns:
            Their ids.

        Raises:
            TypeError: ``nodes`` is not a list of nodes.
            MillpondError: A text cannot be encoded or stored.
        """
        nodes = listed(nodes, "add_nodes", "nodes")
        ids = [node.node_id for node in nodes]
        self.index.add(
            ids,
            [node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes],
            [
                node_to_metadata_dict(
                    node.model_copy(update={"obj": None}) if isinstance(node, IndexNode) else node,
                    remove_text=False,
                    flat_metadata=False,
                )
                for node in nodes
            ],
            show_progress=show_progress,
        )
        self.object_map |= {
            node.index_id: node.obj for node in nodes if isinstance(node, IndexNode) and node.obj is not None
        }
        return ids

    def delete_nodes(self, node_ids: Sequence[str]) -> int:
        """Remove nodes from the index, and return how many; ids that it does not have are ignored.

        Args:
            node_ids: The ids of the nodes.

        Returns:
            How many nodes were removed.

        Raises:
            TypeError: ``node_ids`` is a str or another single item.
        """
        return self.index.delete(listed(node_ids, "delete_nodes", "ids"))

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query, sources = query_bundle.query_str, self._sources and [_function(source) for source in self._sources]
        return self._nodes(
            query, retrieve(self.index, query, k=self.similarity_top_k, sources=sources, **self._options)
        )

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query, sources = query_bundle.query_str, self._sources and [_async_function(source) for source in self._sources]
        hits = await aretrieve(self.index, query, k=self.similarity_top_k, sources=sources, **self._options)
        if not self._include_spans:
            return self._nodes(query, hits)
        return await asyncio.to_thread(self._nodes, query, hits)

    def _nodes(self, query: str, hits: Sequence[Hit]) -> list[NodeWithScore]:
        found = []
        for hit in hits:
            metadata: dict[str, Any] = deepcopy(dict(hit.metadata))
            node: BaseNode = (
                metadata_dict_to_node(metadata)
                if "_node_content" in metadata
                else TextNode(id_=hit.id, text=hit.text, metadata=metadata)
            )
            if self._include_spans:
                first = max(hit.text.rfind(node.get_content(metadata_mode=MetadataMode.NONE)), 0)  # after metadata
                node.metadata[_SPANS] = [
                    {
                        "token": match.token,
                        "score": match.score,
                        "start": match.start - first if match.start >= first else None,
                        "end": match.end - first if match.start >= first else None,
                        "text": match.text,
                    }
                    for match in self.index.explain(query, hit.id)
                ]
                node.excluded_embed_metadata_keys = [*node.excluded_embed_metadata_keys, _SPANS]
                node.excluded_llm_metadata_keys = [*node.excluded_llm_metadata_keys, _SPANS]
            found.append(NodeWithScore(node=node, score=hit.score))
        return found


def _function(source: Any) -> Any:
    if not isinstance(source, BaseRetriever):
        return source
    return lambda query, limit: [found.node.node_id for found in source.retrieve(query)][:limit]


def _async_function(source: Any) -> Any:
    if not isinstance(source, BaseRetriever):
        return source

    async def ids(query: str, limit: int) -> list[str]:
        return [found.node.node_id for found in await source.aretrieve(query)][:limit]

    return ids


def _conditions(filters: MetadataFilters | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """LlamaIndex's filters as metadata values that must match."""
    if filters is None:
        return None
    if isinstance(filters, Mapping):
        return dict(filters)
    if not isinstance(filters, MetadataFilters):
        raise ValueError(f"filters is of type {type(filters).__name__}; pass a dict of metadata or MetadataFilters")
    if len(filters.filters) > 1 and filters.condition != FilterCondition.AND:
        raise ValueError(f"the filters are joined by {filters.condition!r}; a late-interaction index joins by AND")
    conditions: dict[str, Any] = {}
    equal = (FilterOperator.EQ, FilterOperator.IN, FilterOperator.ANY)
    for condition in filters.filters:
        if not isinstance(condition, MetadataFilter) or condition.operator not in (*equal, *_BOUNDS):
            raise ValueError(
                f"the filter {condition!r} is not ==, in, any, >, >=, < or <=, which a late-interaction index has"
            )
        key, word = condition.key, _BOUNDS.get(condition.operator)
        if key not in conditions:
            conditions[key] = {word: condition.value} if word else condition.value
        elif word and isinstance(conditions[key], dict) and word not in conditions[key]:
            conditions[key][word] = condition.value
        else:
            raise ValueError(
                f"two filters name the key {key!r}; a late-interaction index takes one for each, or a range's two ends"
            )
    return conditions
