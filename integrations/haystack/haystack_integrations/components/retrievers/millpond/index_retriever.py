"""MillpondIndexRetriever: Haystack's retriever over a late-interaction index, or a collection that ingest filled."""

from __future__ import annotations

import asyncio
import os
import threading
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from haystack import Document, component
from haystack.core.errors import SerializationError

from haystack_integrations.components.embedders.millpond.component import EngineComponent, engine_options
from haystack_integrations.components.retrievers.millpond.filters import to_conditions
from haystack_integrations.components.retrievers.millpond.places import IndexSource, opened
from millpond.late_interaction import LateInteractionIndex
from millpond.late_interaction.retrieval import retrieve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millpond import Engine


@component
class MillpondIndexRetriever(EngineComponent[IndexSource]):
    """Retrieves documents by late interaction, or from a collection in one search of its database.

    The score is MaxSim, or of a collection the cosine at its largest width: with several widths, the smallest one finds
    candidates.

    Only a retriever over a place can be serialized: an index or a sink is opened anew in each process.

    Args:
        index: A ``MemoryIndex``, ``PlaidIndex``, ``QdrantIndex`` or ``MilvusIndex``, which has an engine; or a sink, as
            a ``QdrantSink``, with ``model`` or ``engine``. Or its place, with ``model`` or ``engine``: the folder of a
            late-interaction index, or the URL of a collection, as ``qdrant+path:vectors#docs``.
        model: The model that filled the index or the collection: hub id or local folder.
        top_k: How many documents to return.
        filters: Haystack's filters (``==``, ``in``, ``>``, ``>=``, ``<``, ``<=``, joined by ``AND``), or for each
            metadata key a value, a list of which one must match, or a range like ``{"gte": 2020}``.
        candidates: How many documents the first stage selects.
        score_threshold: Return only documents with at least this score.
        **options: The other fields of :class:`millpond.compat.adapter.EngineSource`, and ``pooling``.
    """

    def __init__(
        self,
        index: Any,
        *,
        model: str | None = None,
        top_k: int = 10,
        filters: dict[str, Any] | None = None,
        candidates: int | None = None,
        score_threshold: float | None = None,
        **options: Any,
    ) -> None:
        self._index: Any = os.fspath(index) if isinstance(index, str | os.PathLike) else index
        given = engine_options(options) | ({} if model is None else {"model": model})
        engine = getattr(self._index, "engine", None)
        if engine is not None and given:
            raise ValueError(f"{next(iter(given))}= is not read: the index has an engine of its own; leave it out")
        if not isinstance(self._index, str) and not callable(getattr(index, "search", None)):
            raise TypeError(
                f"index is of type {type(index).__name__}; pass a late-interaction index, a sink, or a folder or URL"
            )
        self._source = IndexSource(**given) if engine is None else IndexSource(engine=engine)
        self._own = {"index": self._index, "top_k": top_k, "filters": filters, "candidates": candidates}
        self._own["score_threshold"] = score_threshold
        to_conditions(filters)
        self._lock = threading.Lock()
        self._opened: Any = None if isinstance(self._index, str) else self._index

    def warm_up(self) -> None:
        """Load the model, and open the index."""
        self._open(self._source.load())

    async def warm_up_async(self) -> None:
        """Load the model and open the index, without blocking the event loop."""
        await asyncio.to_thread(self._open, await self._source.aload())

    def close(self) -> None:
        """Close what was opened by its place."""
        if isinstance(self._index, str) and self._opened is not None:
            self._opened.close()
            self._opened = None

    def to_dict(self) -> dict[str, Any]:
        """The component as Haystack writes it.

        Returns:
            Its type and its arguments.

        Raises:
            SerializationError: The component holds an index, a sink or an engine.
        """
        if not isinstance(self._index, str):
            raise SerializationError(
                f"MillpondIndexRetriever: a {type(self._index).__name__} cannot be serialized; pass its folder or URL "
                "and model= instead, and each process opens its own"
            )
        return EngineComponent.to_dict(self)  # no super(): Haystack makes another class of this one

    @component.output_types(documents=list[Document])
    def run(self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None) -> dict[str, Any]:
        """The nearest documents.

        Args:
            query: The query.
            filters: Instead of those of the component.
            top_k: Instead of that of the component.

        Returns:
            ``documents``, best first, with their scores.
        """
        self.warm_up()
        return {"documents": self._search(self._source.load(), query, filters, top_k)}

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, Any]:
        """As :meth:`run`, in a thread."""
        await self.warm_up_async()
        return {"documents": await asyncio.to_thread(self._search, await self._source.aload(), query, filters, top_k)}

    def _open(self, engine: Engine) -> None:
        with self._lock:
            if self._opened is None:  # an empty index is false
                self._opened = opened(self._index, engine)

    def _search(
        self, engine: Engine, query: str, filters: dict[str, Any] | None, top_k: int | None
    ) -> Sequence[Document]:
        options: dict[str, Any] = {
            "k": self._own["top_k"] if top_k is None else top_k,
            "filter": to_conditions(self._own["filters"] if filters is None else filters),
            "candidates": self._own["candidates"],
        }
        index = self._opened
        late = isinstance(index, LateInteractionIndex)
        hits = retrieve(index, query, **options) if late else index.search(engine, query, **options)
        threshold = self._own["score_threshold"]
        return [
            Document(id=hit.id, content=hit.text, meta=deepcopy(dict(hit.metadata)), score=hit.score)
            for hit in hits
            if threshold is None or hit.score >= threshold
        ]
