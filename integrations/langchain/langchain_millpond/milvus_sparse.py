"""MillpondMilvusSparseEmbeddings: langchain-milvus's sparse embeddings over a millpond engine in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_millpond.sparse_source import SparseSource, Weights

if TYPE_CHECKING:
    from langchain_milvus.utils.sparse import BaseSparseEmbedding
else:
    try:
        from langchain_milvus.utils.sparse import BaseSparseEmbedding
    except ImportError:  # not required: the vectors are dicts

        class BaseSparseEmbedding:
            """Stands for langchain-milvus's class where that is not installed."""


class MillpondMilvusSparseEmbeddings(SparseSource, BaseSparseEmbedding):
    """Sparse vectors of texts by a SPLADE checkpoint or BGE-M3 that runs in this process, for ``Milvus``.

    For ``Milvus(embedding_function=[dense, sparse], vector_field=["dense", "sparse"])``. It is langchain-milvus's
    ``BaseSparseEmbedding``, if that package is installed. A vector is ``{token id: weight}``, without weights of 0.
    Otherwise as :class:`MillpondSparseEmbeddings`, whose vectors are of the type that langchain-qdrant expects.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
        engine: A loaded engine, instead of ``model`` and every option that is read at loading. Never serialized.
        query_prompt: Prepended to every query instead of the checkpoint's query prompt; ``""`` for none; ``"auto"`` as
            in ``MillpondEmbeddings``.
        document_prompt: The same for documents.
        query_prompt_name: The name of one of the checkpoint's prompts, for queries.
        document_prompt_name: The same for documents.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        show_progress: Draw a progress bar in ``embed_documents``, if standard error is a terminal, or in a notebook.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` or ``None`` (cuda, then mps, then cpu), a torch device, or a list of devices.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per text; the checkpoint's limit by default.
        hf_overrides: Merged into config.json.
        quantization: ``int8`` or ``fp8``, as in ``millpond.Engine``.
        max_batch_tokens: Most tokens per forward.
        compile: As in ``millpond.Engine``.
        trust_remote_code: A permission that is accepted and never needed: no code of a checkpoint is run.
    """

    def embed_documents(self, texts: list[str]) -> list[Weights]:
        """One sparse vector per document, in order; any number of documents.

        Raises:
            TypeError: ``texts`` is a bare str.
            MillpondError: The model cannot be loaded or gives no sparse vectors, or a text cannot be embedded; the
                message says which and why.
        """
        return self._documents(texts, dict)

    def embed_query(self, query: str) -> Weights:
        """The sparse vector of a query.

        Raises:
            MillpondError: As :meth:`embed_documents`.
        """
        return self._query(query, dict)

    async def aembed_documents(self, texts: list[str]) -> list[Weights]:
        """As :meth:`embed_documents`; cancelling the task drops the texts still queued."""
        return await self._adocuments(texts, dict)

    async def aembed_query(self, query: str) -> Weights:
        """As :meth:`embed_query`."""
        return await self._aquery(query, dict)
