"""MillpondReranker: LangChain's document compressor over a millpond engine in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import Field

from langchain_millpond.source import LangChainSource
from millpond.compat.adapter import RankerSource

if TYPE_CHECKING:
    from millpond import RerankOutput


class MillpondReranker(RankerSource, LangChainSource, BaseDocumentCompressor):
    """Sorts documents by relevance to a query, best first, by a model that runs in this process.

    Cross-encoders (LLM rerankers with their own template) and late-interaction checkpoints score as they were trained
    to; an embedding checkpoint scores by MaxSim over its token states, so the model that retrieved can rerank too. The
    scale of the scores depends on the checkpoint and on ``method``: docs/engine.md has a table.

    Returned documents are copies with ``metadata["relevance_score"]`` added; ids and other metadata are kept, and the
    documents passed in are not changed. With ``model=``, the model is loaded on first use, and all objects of one
    configuration share one engine. The async method neither blocks the event loop nor occupies a thread.

    The other fields: :class:`millpond.compat.adapter.RankerSource` and the class that it derives from.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
        top_n: How many of the best to keep; ``None`` keeps all.
        score_threshold: Keep only documents with at least this score.
    """

    top_n: int | None = Field(default=3, gt=0, strict=True)
    score_threshold: float | None = None

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """The best documents, best first.

        Args:
            documents: The retrieved documents; if there are none, no model is loaded.
            query: The query.
            callbacks: Accepted because LangChain passes them, and ignored.

        Returns:
            Copies of at most ``top_n`` documents, with their scores in ``metadata["relevance_score"]``.

        Raises:
            TypeError: ``documents`` is not a list of documents.
            MillpondError: The model cannot be loaded or does not score, or a text cannot be encoded; the message says
                which and why.
        """
        documents = _listed(documents)
        texts = [document.page_content for document in documents]
        return self._best(documents, self._ranked(query, texts, self.top_n)) if documents else []

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """As :meth:`compress_documents`; cancelling the task drops the pairs still queued.

        Args:
            documents: As :meth:`compress_documents`.
            query: As :meth:`compress_documents`.
            callbacks: As :meth:`compress_documents`.

        Returns:
            Copies of at most ``top_n`` documents, best first.
        """
        documents = _listed(documents)
        texts = [document.page_content for document in documents]
        return self._best(documents, await self._aranked(query, texts, self.top_n)) if documents else []

    def _best(self, documents: Sequence[Document], ranked: RerankOutput) -> list[Document]:
        return [
            document.model_copy(update={"metadata": {**document.metadata, "relevance_score": result.score_or_none}})
            for result in ranked
            for document in [documents[result.index]]
            if self.score_threshold is None or result.relevance_score >= self.score_threshold  # not if it has none
        ]


def _listed(documents: Iterable[Document]) -> list[Document]:
    if isinstance(documents, str | bytes | Mapping | Document):
        raise TypeError(
            f"compress_documents takes a list of documents, not a {type(documents).__name__}; "
            "write compress_documents([Document(page_content=text)], query)"
        )
    listed = list(documents)
    for index, document in enumerate(listed):
        if not isinstance(document, Document):
            kind = type(document).__name__
            raise TypeError(f"the document at index {index} is a {kind}; write Document(page_content=text)")
    return listed
