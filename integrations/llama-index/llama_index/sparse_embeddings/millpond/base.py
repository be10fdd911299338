"""MillpondSparseEmbedding: LlamaIndex's sparse embedding model over a millpond engine in this process."""

from __future__ import annotations

import os
from typing import Any

from llama_index.core.base.embeddings.base_sparse import BaseSparseEmbedding, SparseEmbedding

from llama_index.embeddings.millpond.source import TextSource, listed
from millpond.compat.adapter import PathStr, Truncation
from millpond.tasks import Role

# What LlamaIndex's Qdrant store expects of its two functions: for each text its indices, for each text its weights.
BatchSparseEncoding = tuple[list[list[int]], list[list[float]]]


class MillpondSparseEmbedding(TextSource, BaseSparseEmbedding):
    """Weights of vocabulary entries for each text, by a SPLADE checkpoint or BGE-M3 that runs in this process.

    For hybrid search in Qdrant, pass the functions of this object to the store::

        sparse = MillpondSparseEmbedding("naver/splade-v3")
        store = QdrantVectorStore(
            "docs", client=client, enable_hybrid=True, sparse_doc_fn=sparse.doc_fn, sparse_query_fn=sparse.query_fn
        )

    With ``model_name=``, the model is loaded on first use, and all objects of one configuration share one engine, also
    after pickling. With ``engine=``, that engine is used. The async methods do not block the event loop.

    The options of ``FastEmbedSparse`` and its like are translated into the fields, or refused. The other fields:
    :class:`millpond.compat.adapter.EngineSource`.

    Attributes:
        model_name: Hub id or local folder; also accepted, and readable, as ``model``; the only positional argument.
        embed_batch_size: Texts per call of the engine, which forms its own batches, so larger is better.
        num_workers: Concurrent calls of the engine in ``aget_text_embedding_batch``.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        pooling: As in ``MillpondEmbedding``; sparse weights do not depend on it. With equal options, the two share an
            engine.
        cache: As in ``MillpondEmbedding``, whose vectors it holds; sparse weights are computed anew.
    """

    kind = "sparse"
    loading = (*TextSource.loading, "pooling", "cache")

    truncate: Truncation = "auto"
    pooling: str | None = None
    cache: PathStr | None = None

    def __init__(self, *positional: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(*positional, **options)  # type checkers would take it for one without positional arguments

    def _check_source(self) -> None:
        super()._check_source()
        if self.engine is not None:
            self.model_name = self.engine.spec.name

    def doc_fn(self, texts: list[str]) -> BatchSparseEncoding:
        """The weights of documents, as ``QdrantVectorStore(sparse_doc_fn=)`` expects them.

        The store calls it also in its async methods, so these block the event loop meanwhile.

        Args:
            texts: Any number of documents.

        Returns:
            For each text the indices of its entries, ascending, and for each text their weights; both empty for a text
            without any.

        Raises:
            TypeError: ``texts`` is not a list.
            MillpondError: The model cannot be loaded, makes no sparse weights, or a text cannot be read.
        """
        return _encoded(self.get_text_embedding_batch(listed(texts, "doc_fn", "texts")))

    def query_fn(self, texts: list[str]) -> BatchSparseEncoding:
        """As ``doc_fn``, of queries, as ``QdrantVectorStore(sparse_query_fn=)`` expects them.

        Args:
            texts: Any number of queries.

        Returns:
            For each query the indices of its entries, and for each query their weights, as ``doc_fn``.
        """
        return _encoded([self.get_query_embedding(query) for query in listed(texts, "query_fn", "queries")])

    def _embed(self, texts: list[str], role: Role) -> list[SparseEmbedding]:
        return self._engine().sparse_embed(texts, role=role, truncate=self.truncate).embeddings

    async def _aembed(self, texts: list[str], role: Role) -> list[SparseEmbedding]:
        engine = await self._aengine()
        from millpond import AsyncEngine  # imports torch, which loading has imported already

        output = await AsyncEngine(engine).sparse_embed(texts, role=role, truncate=self.truncate)
        return output.embeddings


def _encoded(embeddings: list[SparseEmbedding]) -> BatchSparseEncoding:
    entries = [sorted(embedding.items()) for embedding in embeddings]
    return [[index for index, _ in text] for text in entries], [[weight for _, weight in text] for text in entries]
