"""MillpondSparseEmbeddings: langchain-qdrant's sparse embeddings over a millpond engine in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from langchain_millpond.sparse_source import SparseSource, Weights

if TYPE_CHECKING:
    from langchain_qdrant import SparseEmbeddings, SparseVector
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


class MillpondSparseEmbeddings(SparseSource, SparseEmbeddings):
    """Sparse vectors of texts by a SPLADE checkpoint or BGE-M3 that runs in this process, for ``QdrantVectorStore``.

    For ``sparse_embedding=`` with ``RetrievalMode.SPARSE`` and ``HYBRID``. It is one of langchain-qdrant's
    ``SparseEmbeddings``, and returns its ``SparseVector``, if that package is installed; otherwise objects with the
    same attributes: ``indices`` (token ids, without duplicates) and ``values`` (their weights). Entries of weight 0 are
    left out, so the vector of a text without any has none.

    With ``model=``, the model is loaded on first use, and all objects of one configuration share one engine, also with
    ``MillpondEmbeddings``: BGE-M3 then gives both kinds of vectors. Documents and queries get the checkpoint's own
    prompts, if it has any. The async methods neither block the event loop nor occupy a thread. The options of
    ``FastEmbedSparse`` are translated into the fields below, or refused with the line to write instead.

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

    def embed_documents(self, texts: list[str]) -> list[SparseVector]:
        """One sparse vector per document, in order; any number of documents.

        Raises:
            TypeError: ``texts`` is a bare str.
            MillpondError: The model cannot be loaded or gives no sparse vectors, or a text cannot be embedded; the
                message says which and why.
        """
        return self._documents(texts, _vector)

    def embed_query(self, text: str) -> SparseVector:
        """The sparse vector of a query.

        Raises:
            MillpondError: As :meth:`embed_documents`.
        """
        return self._query(text, _vector)

    async def aembed_documents(self, texts: list[str]) -> list[SparseVector]:
        """As :meth:`embed_documents`; cancelling the task drops the texts still queued."""
        return await self._adocuments(texts, _vector)

    async def aembed_query(self, text: str) -> SparseVector:
        """As :meth:`embed_query`."""
        return await self._aquery(text, _vector)


def _vector(weights: Weights) -> SparseVector:
    return SparseVector(indices=list(weights), values=list(weights.values()))
