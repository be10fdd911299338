"""MillpondTextEmbedder and MillpondDocumentEmbedder: Haystack's embedders over a millpond engine in this process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from haystack import Document, component

from haystack_integrations.components.embedders.millpond.component import DocumentComponent, TextComponent
from millpond.compat.composed import Embedder


@component
class MillpondTextEmbedder(TextComponent[Embedder]):
    """Embeds a query by a model that runs in this process.

    The query gets the checkpoint's own prompt for queries, if it has one. The options of
    ``SentenceTransformersTextEmbedder`` (``model_kwargs``, ``truncate_dim``, ``normalize_embeddings``, ...) are
    translated, or refused.

    The other options: the fields of :class:`millpond.compat.adapter.EmbeddingSource` and the classes that it derives
    from, as ``dimensions``, ``normalize`` and ``engine``.
    """

    source = Embedder

    @component.output_types(embedding=list[float], meta=dict[str, Any])
    def run(self, text: str) -> dict[str, Any]:
        """The vector of a query.

        Args:
            text: The query.

        Returns:
            ``embedding``, and in ``meta`` the model's name.
        """
        output = self._source.embed(self._texts(text), "query", show_progress=self._own["progress_bar"])
        return {"embedding": output.tolist()[0], "meta": {"model": self._source.name}}

    @component.output_types(embedding=list[float], meta=dict[str, Any])
    async def run_async(self, text: str) -> dict[str, Any]:
        """As :meth:`run`.

        Args:
            text: The query.

        Returns:
            ``embedding``, and in ``meta`` the model's name.
        """
        vectors = await self._source.aembed(self._texts(text), "query")
        return {"embedding": vectors[0], "meta": {"model": self._source.name}}


@component
class MillpondDocumentEmbedder(DocumentComponent[Embedder]):
    """Embeds documents by a model that runs in this process.

    Documents get the checkpoint's own prompt for documents, if it has one. The options of
    ``SentenceTransformersDocumentEmbedder`` are translated, or refused; ``batch_size`` changes nothing, since the
    engine forms its own batches.

    The other options: as those of :class:`MillpondTextEmbedder`.
    """

    source = Embedder

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Copies of the documents with their vectors.

        Args:
            documents: Any number of documents.

        Returns:
            ``documents`` with ``embedding``, and in ``meta`` the model's name.
        """
        texts = self._texts(documents)
        vectors = self._source.embed(texts, "document", show_progress=self._own["progress_bar"]).tolist()
        return self._embedded(documents, vectors)

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        """As :meth:`run`; cancelling the task drops the texts still queued.

        Args:
            documents: Any number of documents.

        Returns:
            ``documents`` with ``embedding``, and in ``meta`` the model's name.
        """
        return self._embedded(documents, await self._source.aembed(self._texts(documents), "document"))

    def _embedded(self, documents: list[Document], vectors: list[list[float]]) -> dict[str, Any]:
        embedded = [replace(document, embedding=vector) for document, vector in zip(documents, vectors, strict=True)]
        return {"documents": embedded, "meta": {"model": self._source.name}}
