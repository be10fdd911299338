"""MillpondColBERTRetriever: LangChain's retriever over a late-interaction index in this process or a database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any, Self
from uuid import NAMESPACE_OID, uuid5

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from langchain_core.vectorstores import VectorStore
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from millpond.late_interaction import Hit, LateInteractionIndex
else:
    # Importing the class would import torch; `_check_index` checks the value instead.
    LateInteractionIndex = Any


def _check_index(value: object) -> object:
    from millpond.late_interaction import LateInteractionIndex

    if not isinstance(value, LateInteractionIndex):
        raise ValueError(
            f"index is of type {type(value).__name__}; pass a MemoryIndex, a PlaidIndex, a QdrantIndex or a MilvusIndex"
        )
    return value


class MillpondColBERTRetriever(BaseRetriever):
    """Retrieves documents by late interaction: MaxSim over the token vectors of query and document.

    A document's ``id`` is that of the index, and its metadata is a copy of what was stored, with ``relevance_score``
    (MaxSim) added, and with ``include_spans`` the characters that each token of the query matched. ``k`` and
    ``filter`` can also be passed to ``invoke``. The async method does not block the event loop. Runs are traced with
    the kind of the index and the name of its model. A copy has the same index and sources; pickling is an error.

    With ``sources``, candidates come from several searches, are fused by reciprocal rank fusion, and the index scores
    them: for example ``sources=["index", bm25_retriever]``.

    Attributes:
        index: A ``MemoryIndex``, ``PlaidIndex``, ``QdrantIndex`` or ``MilvusIndex``. Never serialized.
        k: How many documents to return.
        filter: For each metadata key a value, a list of which one must match, or a range like ``{"gte": 2020}``.
        candidates: Documents that are scored exactly; the index's own number by default, with ``sources``
            ``max(100, 10 * k)``.
        exact: Score every document, without a first stage.
        sources: Where candidates come from: ``"index"``, ``"exact"``, a vector store, a retriever (their documents must
            have the ids of the index), or a function ``(query, limit)`` that returns ids, best first.
        weights: A weight for each source.
        id_key: The metadata key that holds the id of a source's document; by default its ``id``, or the key ``id``.
        include_spans: Add ``metadata["spans"]``: for each token of the query ``token``, ``score``, ``start``, ``end``
            and ``text`` of its best match. The documents returned are encoded again for it.
        score_threshold: Return only documents with at least this score.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    index: Annotated[LateInteractionIndex, BeforeValidator(_check_index)] = Field(exclude=True, repr=False)
    k: int = Field(default=4, gt=0, strict=True)
    filter: dict[str, Any] | None = None
    candidates: int | None = Field(default=None, gt=0, strict=True)
    exact: bool = False
    sources: list[Any] | None = Field(default=None, exclude=True)
    weights: Sequence[float] | None = None
    id_key: str | None = None
    include_spans: bool = False
    score_threshold: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_options(cls, options: Any) -> Any:
        for name in options if isinstance(options, dict) else ():
            if name in ("model", "model_name", "engine", "top_k", "top_n", "similarity_top_k"):
                raise ValueError(
                    f"{name}={options[name]!r} is not an option: the index holds the model, as in "
                    "MillpondColBERTRetriever(index=MemoryIndex(Engine('...'))), and k= is the number of documents"
                )
        return options

    @property
    def model(self) -> str | None:
        """The name of the model of the index; ``None`` of an index that was given embeddings only."""
        engine = self.index.engine
        return None if engine is None else engine.spec.name

    @property
    def model_name(self) -> str | None:
        """``model``."""
        return self.model

    @classmethod
    def from_documents(
        cls, documents: Iterable[Document], *, index: LateInteractionIndex, **options: Any
    ) -> MillpondColBERTRetriever:
        """A retriever over an index to which documents are added.

        Args:
            documents: As :meth:`add_documents`.
            index: The index, for example ``MemoryIndex(Engine("..."))``.
            **options: The other fields.

        Returns:
            The retriever.

        Raises:
            ValueError: An invalid option.
            MillpondError: A text cannot be encoded or stored.
        """
        retriever = cls(index=index, **options)
        retriever.add_documents(documents)
        return retriever

    def add_documents(self, documents: Iterable[Document]) -> list[str]:
        """Add documents to the index; those of equal ids are replaced. The documents are not changed.

        Args:
            documents: Any number of documents.

        Returns:
            Their ids, in order: ``document.id``, or a UUID of the content for a document without one.

        Raises:
            MillpondError: A text cannot be encoded or stored.
        """
        added = list(documents)
        ids = [document.id or str(uuid5(NAMESPACE_OID, document.page_content)) for document in added]
        self.index.add(ids, [document.page_content for document in added], [document.metadata for document in added])
        return ids

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        params = super()._get_ls_params(**kwargs)
        params["ls_vector_store_provider"] = type(self.index).__name__
        params["ls_embedding_provider"] = "millpond"
        if self.index.model is not None:
            params["ls_embedding_model"] = self.index.model.model
        return params

    def __getstate__(self) -> dict[Any, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its index holds files or memory of this process, and a loaded "
            "model; open the index in the other process, and build the retriever on it"
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        for held in (self.index, *(self.sources or ())):
            memo[id(held)] = held  # deep copies share the index and the sources
        return super().__deepcopy__(memo)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        filter: dict[str, Any] | None = None,
    ) -> list[Document]:
        from millpond.late_interaction.retrieval import retrieve

        sources = self.sources and [_function(source, self.id_key) for source in self.sources]
        return self._documents(query, retrieve(self.index, query, **self._options(k, filter), sources=sources))

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
        filter: dict[str, Any] | None = None,
    ) -> list[Document]:
        from millpond.late_interaction.retrieval import aretrieve

        sources = self.sources and [_async_function(source, self.id_key) for source in self.sources]
        hits = await aretrieve(self.index, query, **self._options(k, filter), sources=sources)
        if not self.include_spans:
            return self._documents(query, hits)
        return await asyncio.to_thread(self._documents, query, hits)

    def _options(self, k: int | None, filter: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "k": self.k if k is None else k,
            "filter": self.filter if filter is None else filter,
            "candidates": self.candidates,
            "exact": self.exact,
            "weights": self.weights,
        }

    def _documents(self, query: str, hits: Sequence[Hit]) -> list[Document]:
        documents = []
        for hit in hits:
            if self.score_threshold is not None and hit.score < self.score_threshold:
                continue
            metadata = {**deepcopy(dict(hit.metadata)), "relevance_score": hit.score}
            if self.include_spans:
                metadata["spans"] = [
                    {"token": match.token, "score": match.score, "start": match.start, "end": match.end}
                    | {"text": match.text}
                    for match in self.index.explain(query, hit.id)
                ]
            documents.append(Document(id=hit.id, page_content=hit.text, metadata=metadata))
        return documents


def _function(source: Any, id_key: str | None) -> Any:
    """A source as a function that returns ids."""
    if isinstance(source, VectorStore):
        return lambda query, limit: _ids(source, source.similarity_search(query, k=limit), id_key)
    if isinstance(source, BaseRetriever):  # k is ignored by a retriever that does not take it
        return lambda query, limit: _ids(source, source.invoke(query, k=limit), id_key)
    return source


def _async_function(source: Any, id_key: str | None) -> Any:
    if not isinstance(source, VectorStore | BaseRetriever):
        return source
    find = source.asimilarity_search if isinstance(source, VectorStore) else source.ainvoke

    async def ids(query: str, limit: int) -> list[str]:
        return _ids(source, await find(query, k=limit), id_key)

    return ids


def _ids(source: object, documents: Sequence[Document], id_key: str | None) -> list[str]:
    ids = [
        document.metadata.get(id_key) if id_key else document.id or document.metadata.get("id")
        for document in documents
    ]
    if None in ids:
        where = f"metadata[{id_key!r}]" if id_key else "id, nor metadata['id']"
        raise ValueError(
            f"a document of {type(source).__name__} has no {where}; id_key= names the metadata key that holds "
            "the id under which the index has the document"
        )
    return [str(id) for id in ids]
