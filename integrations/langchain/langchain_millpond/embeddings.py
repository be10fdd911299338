"""MillpondEmbeddings: LangChain's embeddings over a millpond engine in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from langchain_core.embeddings import Embeddings
from pydantic import Field

from langchain_millpond.source import EngineSource, PathStr
from millpond.compat.role_prompts import PromptOptions, log_prompt_notice, role_prompt
from millpond.compat.sentence_transformers_options import translate_embedding_options

if TYPE_CHECKING:
    from millpond import Engine


class MillpondEmbeddings(EngineSource, Embeddings):
    """Text embeddings by a model that runs in this process.

    With ``model=``, the model is loaded on first use, and all objects of one configuration share one engine. With
    ``engine=``, that engine is used. Documents and queries get the checkpoint's own prompts, if it has any; the texts
    themselves are not changed. The async methods neither block the event loop nor occupy a thread.

    The options of ``HuggingFaceEmbeddings`` and of LangChain's classes for BGE and Instructor (``model_kwargs``,
    ``encode_kwargs``, ``query_encode_kwargs``, ``query_instruction``, ...) are translated into the fields below, or
    refused with the line to write instead. Where the checkpoint has prompts that ``HuggingFaceEmbeddings`` never
    applied, the first embedding logs how to keep the vectors of an existing index.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
        engine: A loaded engine, instead of ``model`` and every option that is read at loading. Never serialized.
        query_prompt: Prepended to every query instead of the checkpoint's query prompt; ``""`` for none; ``"auto"`` for
            the checkpoint's or, if its files have none, that of its model card, if known.
        document_prompt: The same for documents.
        query_prompt_name: The name of one of the checkpoint's prompts, for queries; ``""`` for its default prompt, if
            it declares one, which is what ``SentenceTransformer.encode`` applies by itself.
        document_prompt_name: The same for documents.
        dimensions: Matryoshka width of the vectors.
        normalize: Whether to L2-normalize the vectors; by default as the checkpoint does.
        long_texts: ``"mean"`` reads an over-long text to its end, in windows whose vectors are averaged.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        show_progress: Draw a progress bar in ``embed_documents``, if standard error is a terminal, or in a
            notebook.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` or ``None`` (cuda, then mps, then cpu), a torch device, or a list of devices.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per text; the checkpoint's limit by default.
        pooling: Replaces the checkpoint's pooling method.
        hf_overrides: Merged into config.json, for example ``{"is_matryoshka": True}``.
        quantization: ``int8`` or ``fp8``, as in ``millpond.Engine``.
        max_batch_tokens: Most tokens per forward.
        compile: As in ``millpond.Engine``.
        cache: Path of a vector cache. To share a ``VectorCache`` object, give it to an engine and pass that.
        trust_remote_code: A permission that is accepted and never needed: no code of a checkpoint is run.
    """

    loading = (*EngineSource.loading, "pooling", "cache")

    query_prompt: str | None = None
    document_prompt: str | None = None
    query_prompt_name: str | None = None
    document_prompt_name: str | None = None
    dimensions: int | None = Field(default=None, gt=0, strict=True)
    normalize: bool | None = None
    long_texts: Literal["mean"] | None = None
    truncate: Literal["end", "start", "error"] = "end"
    show_progress: bool = False
    pooling: str | None = None
    cache: PathStr | None = None

    @classmethod
    def _translated(cls, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("sparse"):
            raise ValueError(
                "sparse= is no option of dense vectors; write MillpondSparseEmbeddings(model=...) beside this"
            )
        return translate_embedding_options(options, own=cls._own_options(), replaced="HuggingFaceEmbeddings")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector per document, in order; any number of documents.

        Raises:
            TypeError: ``texts`` is a bare str.
            MillpondError: The model cannot be loaded, or a text cannot be embedded; the message says which and why.
        """
        engine = self._engine()
        options = self._options(engine, "document")
        return engine.embed(texts, show_progress=self.show_progress, **options).tolist()

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query.

        Raises:
            MillpondError: The model cannot be loaded, or the text cannot be embedded.
        """
        engine = self._engine()
        return engine.embed([text], **self._options(engine, "query")).tolist()[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """As :meth:`embed_documents`; cancelling the task drops the texts still queued."""
        return await self._aembed(texts, "document")

    async def aembed_query(self, text: str) -> list[float]:
        """As :meth:`embed_query`."""
        return (await self._aembed([text], "query"))[0]

    async def _aembed(self, texts: list[str], role: Literal["query", "document"]) -> list[list[float]]:
        engine = await self._aengine()
        from millpond import AsyncEngine  # imports torch, which loading has imported already

        output = await AsyncEngine(engine).embed(texts, **self._options(engine, role))
        return await output.atolist()

    def _options(self, engine: Engine, role: Literal["query", "document"]) -> dict[str, Any]:
        prompts = {
            "query": PromptOptions(text=self.query_prompt, name=self.query_prompt_name),
            "document": PromptOptions(text=self.document_prompt, name=self.document_prompt_name),
        }
        log_prompt_notice(
            engine.spec, **prompts, normalize=self.normalize, pooling=self.pooling, replaced="HuggingFaceEmbeddings"
        )
        return {
            "role": role,
            "prompt": None if prompts[role] == PromptOptions() else role_prompt(engine.spec, role, prompts[role]),
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "long_texts": self.long_texts,
            "truncate": self.truncate,
        }
