"""MillpondSparseEmbeddings: sparse embeddings of langchain-qdrant and langchain-milvus over a millpond engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from langchain_millpond.source import LangChainSource
from millpond.compat.adapter import PromptSource
from millpond.tasks import Role

if TYPE_CHECKING:
    from langchain_qdrant import SparseEmbeddings, SparseVector

    from millpond import Engine
else:
    try:
        from langchain_qdrant.sparse_embeddings import SparseEmbeddings, SparseVector
    except ImportError:  # not required: the vectors have the same attributes without it

        class SparseEmbeddings:
            """Stands for langchain-qdrant's class where that is not installed."""

        class SparseVector(BaseModel, extra="forbid"):
            """Token ids, and a weight for each."""

            indices: list[int]
            values: list[float]


_ROWS_PER_TURN = 64  # vectors that are made in one turn of an event loop


class MillpondSparseEmbeddings(PromptSource, LangChainSource, SparseEmbeddings):
    """Sparse vectors of texts by a SPLADE checkpoint or BGE-M3 that runs in this process.

    For ``sparse_embedding=`` of ``QdrantVectorStore`` with ``RetrievalMode.SPARSE`` and ``HYBRID``, and with
    ``store="milvus"`` for ``Milvus(embedding_function=[dense, sparse], vector_field=["dense", "sparse"])``. It counts
    as langchain-qdrant's ``SparseEmbeddings`` and langchain-milvus's ``BaseSparseEmbedding`` where these are installed.

    With ``model=``, the model is loaded on first use, and all objects of one configuration share one engine, also with
    ``MillpondEmbeddings``: BGE-M3 then gives both kinds of vectors. Documents and queries get the checkpoint's own
    prompts, if it has any. The async methods neither block the event loop nor occupy a thread. The options of
    ``FastEmbedSparse`` are translated into the fields, or refused.

    The other fields: :class:`millpond.compat.adapter.PromptSource` and the class that it derives from.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
        store: Whose vectors it gives: ``"qdrant"``: langchain-qdrant's ``SparseVector`` (``indices``, token ids without
            duplicates, and ``values``), or an object with the same attributes; ``"milvus"``: ``{token id: weight}``.
        show_progress: Draw a progress bar in ``embed_documents``, if standard error is a terminal, or in a notebook.
    """

    kind = "sparse"

    store: Literal["qdrant", "milvus"] = "qdrant"
    show_progress: bool = False

    def embed_documents(self, texts: list[str]) -> list[Any]:
        """One vector per document, in order, as ``store`` says; without entries of weight 0.

        Args:
            texts: Any number of documents.

        Returns:
            For each document ``indices`` and ``values``, or ``{token id: weight}`` with ``store="milvus"``.

        Raises:
            TypeError: ``texts`` is a bare str.
            MillpondError: The model cannot be loaded or gives no sparse vectors, or a text cannot be embedded; the
                message says which and why.
        """
        engine = self._engine()
        rows = engine.encode(texts, **self._options(engine, "document"), show_progress=self.show_progress)
        return [self._vector(row) for row in rows]

    def embed_query(self, text: str) -> Any:
        """The vector of a query, as ``store`` says.

        Args:
            text: The query.

        Returns:
            ``indices`` and ``values``, or ``{token id: weight}`` with ``store="milvus"``.
        """
        engine = self._engine()
        return self._vector(engine.encode([text], **self._options(engine, "query"))[0])

    async def aembed_documents(self, texts: list[str]) -> list[Any]:
        """As :meth:`embed_documents`; cancelling the task drops the texts still queued.

        Args:
            texts: Any number of documents.

        Returns:
            For each document ``indices`` and ``values``, or ``{token id: weight}`` with ``store="milvus"``.
        """
        return await self._avectors(texts, "document")

    async def aembed_query(self, text: str) -> Any:
        """As :meth:`embed_query`, without blocking the event loop.

        Args:
            text: The query.

        Returns:
            ``indices`` and ``values``, or ``{token id: weight}`` with ``store="milvus"``.
        """
        return (await self._avectors([text], "query"))[0]

    async def _avectors(self, texts: list[str], role: Role) -> list[Any]:
        engine = await self._aengine()
        from millpond import AsyncEngine  # imports torch, which loading has imported already

        rows = await AsyncEngine(engine).encode(texts, **self._options(engine, role))
        vectors: list[Any] = []
        for start in range(0, len(rows), _ROWS_PER_TURN):
            if start:
                await asyncio.sleep(0)
            vectors += map(self._vector, rows[start : start + _ROWS_PER_TURN])
        return vectors

    def _vector(self, weights: Mapping[int, float]) -> Any:
        if self.store == "milvus":
            return dict(weights)
        return SparseVector(indices=list(weights), values=list(weights.values()))

    def _options(self, engine: Engine, role: Role) -> dict[str, Any]:
        """The options of ``encode``, which takes a prompt for sparse vectors too."""
        from millpond import PoolingParams

        params = PoolingParams(role=role, prompt=self._prompt(engine, role), truncate=self.truncate)
        return {"task": "sparse_embed", "params": params}

    def model_post_init(self, context: Any) -> None:
        """Make the class one of langchain-milvus's, which looks for its own. Its import takes a second."""
        if self.store == "milvus":
            with suppress(ImportError):  # not required: the vectors are dicts
                from langchain_milvus.utils.sparse import BaseSparseEmbedding

                BaseSparseEmbedding.register(MillpondSparseEmbeddings)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        self.model_post_init(None)
