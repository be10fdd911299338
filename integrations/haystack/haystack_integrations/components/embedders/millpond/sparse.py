"""The sparse twins of Haystack's embedders over a millpond engine in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from haystack import Document, component
from haystack.dataclasses import SparseEmbedding

from haystack_integrations.components.embedders.millpond.component import DocumentComponent, TextComponent
from millpond.compat.composed import SparseEmbedder


@component
class MillpondSparseTextEmbedder(TextComponent[SparseEmbedder]):
    """Weighs the vocabulary for a query, by a SPLADE checkpoint or BGE-M3 that runs in this process.

    The options of ``FastembedSparseTextEmbedder`` are translated, or refused. The other options: the fields of
    :class:`millpond.compat.composed.SparseEmbedder` and the classes that it derives from.
    """

    source = SparseEmbedder

    @component.output_types(sparse_embedding=SparseEmbedding)
    def run(self, text: str) -> dict[str, SparseEmbedding]:
        """The weights of a query.

        Args:
            text: The query.

        Returns:
            ``sparse_embedding``, by ascending token id.
        """
        rows = self._source.embed(self._texts(text), "query", show_progress=self._own["progress_bar"])
        return {"sparse_embedding": _weights(rows[0])}

    @component.output_types(sparse_embedding=SparseEmbedding)
    async def run_async(self, text: str) -> dict[str, SparseEmbedding]:
        """As :meth:`run`.

        Args:
            text: The query.

        Returns:
            ``sparse_embedding``, by ascending token id.
        """
        return {"sparse_embedding": _weights((await self._source.aembed(self._texts(text), "query"))[0])}


@component
class MillpondSparseDocumentEmbedder(DocumentComponent[SparseEmbedder]):
    """Weighs the vocabulary for documents, by a SPLADE checkpoint or BGE-M3 that runs in this process.

    The options: as those of :class:`MillpondSparseTextEmbedder`.
    """

    source = SparseEmbedder

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Copies of the documents with their weights.

        Args:
            documents: Any number of documents.

        Returns:
            ``documents`` with ``sparse_embedding``.
        """
        texts = self._texts(documents)
        return _weighed(documents, self._source.embed(texts, "document", show_progress=self._own["progress_bar"]))

    @component.output_types(documents=list[Document])
    async def run_async(self, documents: list[Document]) -> dict[str, list[Document]]:
        """As :meth:`run`; cancelling the task drops the texts still queued.

        Args:
            documents: Any number of documents.

        Returns:
            ``documents`` with ``sparse_embedding``.
        """
        return _weighed(documents, await self._source.aembed(self._texts(documents), "document"))


def _weights(row: Mapping[int, float]) -> SparseEmbedding:
    return SparseEmbedding(indices=list(row), values=list(row.values()))


def _weighed(documents: list[Document], rows: list[dict[int, float]]) -> dict[str, list[Document]]:
    pairs = zip(documents, rows, strict=True)
    return {"documents": [replace(document, sparse_embedding=_weights(row)) for document, row in pairs]}
