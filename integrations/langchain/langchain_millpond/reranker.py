"""MillpondReranker: LangChain's document compressor over a millpond engine in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import Field

from langchain_millpond.scorer import ScorerSource
from millpond.compat.rerank_method import log_rerank_method

if TYPE_CHECKING:
    from millpond import RerankOutput


class MillpondReranker(ScorerSource, BaseDocumentCompressor):
    """Sorts documents by relevance to a query, best first, by a model that runs in this process.

    Cross-encoders (LLM rerankers with their own template) and late-interaction checkpoints score as they were trained
    to; an embedding checkpoint scores by MaxSim over its token states, so the model that retrieved can rerank too. The
    scale of the scores depends on the checkpoint and on ``method``: docs/engine.md has a table.

    Returned documents are copies with ``metadata["relevance_score"]`` added; ids and other metadata are kept, and the
    documents passed in are not changed. With ``model=``, the model is loaded on first use, and all objects of one
    configuration share one engine. The async method neither blocks the event loop nor occupies a thread.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
        engine: A loaded engine, instead of ``model`` and every option that is read at loading. Never serialized.
        top_n: How many of the best to keep; ``None`` keeps all.
        score_threshold: Keep only documents with at least this score.
        method: How a pair is scored: ``cosine`` of two vectors, ``maxsim`` of token vectors, or ``auto``, by what the
            checkpoint is.
        instruction: Text for the instruction slot of an LLM reranker's template; refused by a model without one.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        activation: Replaces the checkpoint's activation of its logits: ``identity``, ``sigmoid`` or ``softmax``.
        convert: ``auto``, ``embed`` or ``classify``, as in ``millpond.Engine``.
        score_template: Jinja source, or a .jinja file, that renders a pair; the checkpoint's template by default.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` or ``None`` (cuda, then mps, then cpu), a torch device, or a list of devices.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per pair, or per text if texts are encoded apart; the checkpoint's limit by default.
        hf_overrides: Merged into config.json.
        quantization: As in ``millpond.Engine``.
        max_batch_tokens: Most tokens per forward.
        compile: As in ``millpond.Engine``.
        trust_remote_code: A permission that is accepted and never needed: no code of a checkpoint is run.
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

        Raises:
            TypeError: ``documents`` is no list of documents.
            MillpondError: The model cannot be loaded or does not score, or a text cannot be encoded; the message says
                which and why.
        """
        documents = _listed(documents)
        if not documents:
            return []
        texts = [document.page_content for document in documents]
        engine = self._engine()
        log_rerank_method(engine.spec, self.method)
        ranked = engine.rerank(query, texts, top_n=self.top_n, **self._options())
        return self._best(documents, ranked)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """As :meth:`compress_documents`; cancelling the task drops the pairs still queued."""
        documents = _listed(documents)
        if not documents:
            return []
        texts = [document.page_content for document in documents]
        engine = await self._aengine()
        log_rerank_method(engine.spec, self.method)
        from millpond import AsyncEngine  # imports torch, which loading has imported already

        ranked = await AsyncEngine(engine).rerank(query, texts, top_n=self.top_n, **self._options())
        return self._best(documents, ranked)

    def _best(self, documents: Sequence[Document], ranked: RerankOutput) -> list[Document]:
        return [
            document.model_copy(update={"metadata": {**document.metadata, "relevance_score": result.relevance_score}})
            for result in ranked
            for document in [documents[result.index]]
            if self.score_threshold is None or result.relevance_score >= self.score_threshold
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
            raise TypeError(
                f"the document at index {index} is a {type(document).__name__}; write Document(page_content=text)"
            )
    return listed
