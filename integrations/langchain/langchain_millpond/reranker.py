"""MillpondReranker: LangChain's document compressor over a millpond engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import Field

from langchain_millpond.scorer import ScorerSource

if TYPE_CHECKING:
    from millpond import RerankOutput


class MillpondReranker(ScorerSource, BaseDocumentCompressor):
    """The documents that answer a query best, the best one first, by a model that runs in this process.

    A cross-encoder (an LLM reranker in its own template) and a late-interaction checkpoint score as they were trained
    to; an embedding checkpoint scores by MaxSim over its token states, so the model that retrieved can rerank too. The
    scale of the scores is the checkpoint's.

    Documents come back as copies with ``metadata["relevance_score"]``, ids and other metadata kept; what was passed in
    is left as it was. Built from ``model=``, it loads on first use, and all objects of one configuration share one
    engine. The async method waits for the engine without blocking the event loop or taking a thread.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
        engine: A loaded engine instead of ``model`` and of every option that loading reads. Never serialized.
        top_n: Keep the best only; ``None`` keeps all.
        score_threshold: Keep documents with at least this score only.
        instruction: Fills an LLM reranker's template slot, nothing else.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        activation: Replaces what the checkpoint makes of its logits: ``identity``, ``sigmoid`` or ``softmax``.
        convert: ``auto``, ``embed`` or ``classify``, as in ``millpond.Engine``.
        score_template: Jinja source, or a .jinja file, that renders a pair; the checkpoint's own by default.
        quantization: As in ``millpond.Engine``.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` (cuda, then mps, then cpu) or a torch device.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per pair, or per text where texts are read apart; the checkpoint's own by default.
        hf_overrides: Merged into config.json.
        max_batch_tokens: Most tokens per forward.
        trust_remote_code: Never needed, and refused by the engine.
    """

    top_n: int | None = Field(default=3, gt=0, strict=True)
    score_threshold: float | None = None

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """The best documents, best first.

        Args:
            documents: What was retrieved; without any, nothing is loaded.
            query: What was asked.
            callbacks: Accepted, since LangChain passes them; nothing here calls them.

        Raises:
            MillpondError: The model cannot be loaded or does not score, or a text cannot be read; the message says
                which and why.
        """
        if not documents:
            return []
        texts = [document.page_content for document in documents]
        engine = self._engine()
        if self._by_tokens(engine):
            from millpond.late_interaction import rerank

            ranked = rerank(engine, query, texts, top_n=self.top_n, truncate=self.truncate)
        else:
            ranked = engine.rerank(query, texts, top_n=self.top_n, instruction=self.instruction, truncate=self.truncate)
        return self._chosen(documents, ranked)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """As :meth:`compress_documents`; cancelling the task drops what is still queued."""
        if not documents:
            return []
        texts = [document.page_content for document in documents]
        engine = await self._aengine()
        if self._by_tokens(engine):
            from millpond.late_interaction import arerank

            ranked = await arerank(engine, query, texts, top_n=self.top_n, truncate=self.truncate)
        else:
            from millpond import AsyncEngine  # after loading: torch is imported by now

            ranked = await AsyncEngine(engine).rerank(
                query, texts, top_n=self.top_n, instruction=self.instruction, truncate=self.truncate
            )
        return self._chosen(documents, ranked)

    def _chosen(self, documents: Sequence[Document], ranked: RerankOutput) -> list[Document]:
        return [
            document.model_copy(update={"metadata": {**document.metadata, "relevance_score": result.relevance_score}})
            for result in ranked
            for document in [documents[result.index]]
            if self.score_threshold is None or result.relevance_score >= self.score_threshold
        ]
