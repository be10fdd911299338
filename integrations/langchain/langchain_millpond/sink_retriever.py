"""MillpondSinkRetriever: LangChain's retriever over a collection that millpond's ingest filled."""

from __future__ import annotations

import os
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any, Literal

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from pydantic import BeforeValidator, ConfigDict, Field

from langchain_millpond.source import LangChainSource

if TYPE_CHECKING:
    from millpond import Engine
    from millpond.ingest import CollectionSink

    Sink = CollectionSink[Any]
else:
    # Importing the classes would import torch; `_check_sink` and the search check the values instead.
    Sink, Engine = Any, Any


def _check_sink(value: object) -> object:
    if not callable(getattr(value, "search", None)) or not hasattr(value, "collection"):
        raise ValueError(
            f"sink is of type {type(value).__name__}; pass a QdrantSink, a MilvusSink or another sink that searches, "
            "as open_sink(url) opens it"
        )
    return value


class MillpondSinkRetriever(LangChainSource, BaseRetriever):
    """Retrieves the records of a collection in one search of its database, coarse to fine or hybrid.

    With several Matryoshka widths, the smallest one finds candidates and the largest scores them, unless the database
    compares every row in this process. A document's ``id``
    is the record's, and its metadata is a copy of what was stored, with ``relevance_score`` added: the cosine at the
    largest width, or of a hybrid search the fused score. ``k`` and ``filter`` can also be passed to ``invoke``.

    The other fields: :class:`millpond.compat.adapter.EngineSource`.

    Attributes:
        sink: A ``QdrantSink``, ``MilvusSink`` or any other of ``open_sink(url)``. Never serialized.
        model: The model that filled the collection: hub id or local folder; also accepted as ``model_name``.
        k: How many documents to return.
        coarse_to_fine: Search a collection of several widths in two stages, or by the largest alone; by default as its
            sink does.
        candidates: How many documents the first stage selects, ``max(100, 10 * k)`` by default.
        filter: For each metadata key a value, a list of which one must match, or a range like ``{"gte": 2020}``; or the
            database's own filter.
        hybrid: Fuse the ranking with that of the sparse vectors.
        sparse_engine: The engine of the sparse vectors, by default ``engine``. Never serialized.
        expand: ``"parent"`` returns ``k`` documents in place of chunks, each once, with the text of all of its chunks;
            its metadata is that of the best chunk, which is ``page_content[chunk_start:chunk_end]``.
        score_threshold: Return only documents with at least this score.
        pooling: Replaces the checkpoint's pooling method, as it did when the collection was filled.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    loading = (*LangChainSource.loading, "pooling")

    sink: Annotated[Sink, BeforeValidator(_check_sink)] = Field(exclude=True, repr=False)
    k: int = Field(default=4, gt=0, strict=True)
    coarse_to_fine: bool | None = None
    candidates: int | None = Field(default=None, gt=0, strict=True)
    filter: Any = None
    hybrid: bool = False
    sparse_engine: Engine | None = Field(default=None, exclude=True, repr=False)
    expand: Literal["parent"] | None = None
    score_threshold: float | None = None
    pooling: str | None = None

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Whether LangChain's ``dumps`` and ``loads`` keep it: a sink is opened anew in each process."""
        return False

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        params = super()._get_ls_params(**kwargs)
        params["ls_vector_store_provider"] = type(self.sink).__name__
        params["ls_embedding_provider"] = "millpond"
        folder = os.path.expanduser(self.model_name)
        params["ls_embedding_model"] = os.path.basename(folder) if os.path.isdir(folder) else self.model_name
        return params

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, filter: Any = None
    ) -> list[Document]:
        hits = self.sink.search(
            self._engine(),
            query,
            k=self.k if k is None else k,
            coarse_to_fine=self.coarse_to_fine,
            candidates=self.candidates,
            filter=self.filter if filter is None else filter,
            hybrid=self.hybrid,
            sparse_engine=self.sparse_engine,
            **({} if self.expand is None else {"expand": self.expand}),
        )
        return [
            Document(
                id=hit.id,
                page_content=hit.text,
                metadata={**deepcopy(dict(hit.metadata)), "relevance_score": hit.score},
            )
            for hit in hits
            if self.score_threshold is None or hit.score >= self.score_threshold
        ]
