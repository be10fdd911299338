"""MillpondEmbeddings: LangChain's embeddings over a millpond engine in this process."""

from __future__ import annotations

from langchain_core.embeddings import Embeddings

from langchain_millpond.source import LangChainSource
from millpond.compat.adapter import EmbeddingSource


class MillpondEmbeddings(EmbeddingSource, LangChainSource, Embeddings):
    """Text embeddings by a model that runs in this process.

    With ``model=``, the model is loaded on first use, and all objects of one configuration share one engine. With
    ``engine=``, that engine is used. Documents and queries get the checkpoint's own prompts, if it has any; the texts
    themselves are not changed. The async methods neither block the event loop nor occupy a thread, and cancelling a
    task drops its texts that are still queued.

    The options of ``HuggingFaceEmbeddings`` and of LangChain's classes for BGE and Instructor (``model_kwargs``,
    ``encode_kwargs``, ``query_encode_kwargs``, ``query_instruction``, ...) are translated into the fields, or refused.
    Where the checkpoint has prompts that ``HuggingFaceEmbeddings`` never applied, the first embedding logs how to keep
    the vectors of an existing index.

    The other fields: :class:`millpond.compat.adapter.EmbeddingSource` and the classes that it derives from. Every
    method raises MillpondError if the model cannot be loaded or a text cannot be embedded, and says which and why.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
        show_progress: Draw a progress bar in ``embed_documents``, if standard error is a terminal, or in a notebook.
    """

    show_progress: bool = False

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector of ``d`` floats for each document, in order.

        Args:
            texts: Any number of documents.

        Returns:
            ``n`` lists of ``d`` floats.

        Raises:
            TypeError: ``texts`` is a bare str.
        """
        return self._embed(texts, "document", show_progress=self.show_progress)

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query, ``d`` floats.

        Args:
            text: The query.

        Returns:
            A list of ``d`` floats.
        """
        return self._embed([text], "query")[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """As :meth:`embed_documents`.

        Args:
            texts: Any number of documents.

        Returns:
            ``n`` lists of ``d`` floats.
        """
        return await self._aembed(texts, "document")

    async def aembed_query(self, text: str) -> list[float]:
        """As :meth:`embed_query`.

        Args:
            text: The query.

        Returns:
            A list of ``d`` floats.
        """
        return (await self._aembed([text], "query"))[0]
