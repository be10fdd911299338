"""MillpondEmbeddings: LangChain's embeddings over a millpond engine in this process."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.embeddings import Embeddings
from pydantic import Field

from langchain_millpond.source import EngineSource, PathStr


class MillpondEmbeddings(EngineSource, Embeddings):
    """Text embeddings by a model that runs in this process.

    With ``model=``, the model is loaded on first use, and all objects of one configuration share one engine. With
    ``engine=``, that engine is used. Documents and queries get the checkpoint's own prompts, if it has any; the texts
    themselves are not changed. The async methods neither block the event loop nor occupy a thread.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
        engine: A loaded engine, instead of ``model`` and every option that is read at loading. Never serialized.
        query_prompt: Prepended to every query instead of the checkpoint's query prompt; ``""`` for none.
        document_prompt: Prepended to every document instead of the checkpoint's document prompt; ``""`` for none.
        dimensions: Matryoshka width of the vectors.
        normalize: Whether to L2-normalize the vectors; by default as the checkpoint does.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        show_progress: Draw a progress bar in ``embed_documents``, if standard error is a terminal, or in a
            notebook.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` (cuda, then mps, then cpu) or a torch device.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per text; the checkpoint's limit by default.
        pooling: Replaces the checkpoint's pooling method.
        hf_overrides: Merged into config.json, for example ``{"is_matryoshka": True}``.
        max_batch_tokens: Most tokens per forward.
        cache: Path of a vector cache. To share a ``VectorCache`` object, give it to an engine and pass that.
        trust_remote_code: Never needed, and refused by the engine.
    """

    loading = (*EngineSource.loading, "pooling", "cache")

    query_prompt: str | None = None
    document_prompt: str | None = None
    dimensions: int | None = Field(default=None, gt=0, strict=True)
    normalize: bool | None = None
    truncate: Literal["end", "start", "error"] = "end"
    show_progress: bool = False
    pooling: str | None = None
    cache: PathStr | None = None

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector per document, in order; any number of documents.

        Raises:
            TypeError: ``texts`` is a bare str.
            MillpondError: The model cannot be loaded, or a text cannot be embedded; the message says which and why.
        """
        return self._engine().embed(texts, show_progress=self.show_progress, **self._options("document")).tolist()

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query.

        Raises:
            MillpondError: The model cannot be loaded, or the text cannot be embedded.
        """
        return self._engine().embed([text], **self._options("query")).tolist()[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """As :meth:`embed_documents`; cancelling the task drops the texts still queued."""
        return await self._aembed(texts, "document")

    async def aembed_query(self, text: str) -> list[float]:
        """As :meth:`embed_query`."""
        return (await self._aembed([text], "query"))[0]

    async def _aembed(self, texts: list[str], role: Literal["query", "document"]) -> list[list[float]]:
        engine = await self._aengine()
        from millpond import AsyncEngine  # imports torch, which loading has imported already

        output = await AsyncEngine(engine).embed(texts, **self._options(role))
        return await output.atolist()

    def _options(self, role: Literal["query", "document"]) -> dict[str, Any]:
        prompt = self.query_prompt if role == "query" else self.document_prompt
        return {
            "role": role,
            "prompt": prompt,
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "truncate": self.truncate,
        }
