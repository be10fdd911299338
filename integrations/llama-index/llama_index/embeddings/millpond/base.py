"""MillpondEmbedding: LlamaIndex's embedding model over a millpond engine in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import BaseNode
from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from llama_index.embeddings.millpond.replaced_options import replaced_embedding_options
from llama_index.embeddings.millpond.source import EngineSource, PathStr
from llama_index.embeddings.millpond.text_lists import TextLists, listed
from millpond.compat.role_prompts import PromptOptions, log_prompt_notice, role_prompt
from millpond.errors import EngineOverloadedError
from millpond.tasks import Role

if TYPE_CHECKING:
    from llama_index.sparse_embeddings.millpond import MillpondSparseEmbedding
    from millpond import Engine


class MillpondEmbedding(TextLists, EngineSource, BaseEmbedding):
    """Text embeddings by a model that runs in this process.

    With ``model_name=``, the model is loaded on first use, and all objects of one configuration share one engine, also
    after pickling. With ``engine=``, that engine is used. Texts and queries get the checkpoint's own prompts, if it has
    any. The async methods do not block the event loop.

    Every option that changes a vector is a public field, so that the cache key of an ``IngestionPipeline`` has it.

    Attributes:
        model_name: Hub id or local folder; also accepted, and readable, as ``model``; the only positional argument.
        engine: A loaded engine, instead of ``model_name`` and every option that is read at loading. Never serialized.
        engine_identity: Written when an object with ``engine=`` is serialized: which engine it was.
        embed_batch_size: Texts per call of the engine, which forms its own batches, so larger is better.
        num_workers: Concurrent calls of the engine in ``aget_text_embedding_batch``.
        query_prompt: Prepended to every query instead of the checkpoint's query prompt; ``""`` for none; ``"auto"``:
            the checkpoint's, else that of its model card, if it is known.
        document_prompt: Prepended to every text instead of the checkpoint's document prompt, with the same values.
        query_prompt_name: Name of one of the checkpoint's prompts for queries, instead of ``query_prompt``.
        document_prompt_name: The same for texts.
        dimensions: Matryoshka width of the vectors.
        normalize: Whether to L2-normalize the vectors; by default as the checkpoint does.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        long_texts: ``"mean"`` reads an over-long text to its end, in windows, whose vectors are averaged.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` or ``None`` (cuda, then mps, then cpu), a torch device, or a list of them.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per text; the checkpoint's limit by default.
        pooling: Replaces the checkpoint's pooling method.
        hf_overrides: Merged into config.json, for example ``{"is_matryoshka": True}``.
        max_batch_tokens: Most tokens per forward.
        quantization: ``int8`` or ``fp8`` weights, as in ``millpond.Engine``.
        compile: Compile the model, as in ``millpond.Engine``.
        cache: Path of a vector cache, whose keys (unlike those of ``embeddings_cache``) include model, role and width.
            To share a ``VectorCache`` object, give it to an engine and pass that.
        trust_remote_code: Accepted, and never needed.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    named = "model_name"
    loading = (*EngineSource.loading, "pooling", "cache")

    model_name: PathStr = Field(default="", validation_alias=AliasChoices("model_name", "model"))
    engine_identity: str | None = None
    embed_batch_size: int = Field(default=2048, gt=0, le=2048)
    # Without a limit the base class would submit a whole corpus to the engine's bounded queue at once.
    num_workers: int | None = 16
    query_prompt: str | None = None
    document_prompt: str | None = None
    query_prompt_name: str | None = None
    document_prompt_name: str | None = None
    dimensions: int | None = Field(default=None, gt=0, strict=True)
    normalize: bool | None = None
    truncate: Literal["end", "start", "error"] = "end"
    long_texts: Literal["mean"] | None = None
    pooling: str | None = None
    cache: PathStr | None = None

    def __init__(self, *positional: str | os.PathLike[str], **options: Any) -> None:
        """From the fields above, of which only ``model_name`` may be positional."""
        super().__init__(**self._with_positional(positional, options, "model_name"))

    @classmethod
    def _translated(cls, options: dict[str, Any], own: set[str]) -> dict[str, Any]:
        return replaced_embedding_options(options, own)

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialized data."""
        return "MillpondEmbedding"

    @property
    def model(self) -> str:
        """``model_name``."""
        return self.model_name

    @property
    def sparse(self) -> MillpondSparseEmbedding:
        """The sparse embeddings of the same checkpoint, by the same engine.

        Their methods raise ``UnsupportedTaskError`` unless the checkpoint makes both, as BGE-M3 does.
        """
        from llama_index.sparse_embeddings.millpond import MillpondSparseEmbedding

        if self.engine is not None:
            return MillpondSparseEmbedding(engine=self.engine, truncate=self.truncate)
        return MillpondSparseEmbedding(self.model_name, truncate=self.truncate, **self._loading())

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        engine, identity = self.engine, self.engine_identity
        if engine is None:
            if identity is not None:
                raise ValueError(
                    f"this was serialized with engine= (a {self.model_name}), which is not serialized; "
                    "pass that engine: from_dict(data, engine=...)"
                )
            if not self.model_name:
                raise ValueError("pass either model_name= (a hub id or a folder) or engine= (a loaded millpond.Engine)")
            return self
        if identity is not None and identity != _identity(engine):
            raise ValueError(f"this was serialized with another engine than {engine!r}; pass one of the same settings")
        if self.model_name and identity is None:
            raise ValueError("pass either model_name= or engine=, not both; the engine knows its model")
        self._check_loading()
        self.model_name = engine.spec.name
        return self

    @model_serializer(mode="wrap")
    def custom_model_dump(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """The public fields, the class's name and, with ``engine=``, the identity of the engine.

        The identity lets a pipeline's cache distinguish two engines of one model, and makes deserializing without the
        engine an error.
        """
        data: dict[str, Any] = handler(self)
        data["class_name"] = self.class_name()
        if self.engine is not None and "engine_identity" in data:
            data["engine_identity"] = _identity(self.engine)
        return data

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Set the ``embedding`` of every node, as a step of an ``IngestionPipeline``.

        Raises:
            TypeError: ``nodes`` is not a list of nodes.
        """
        return super().__call__(listed(nodes, "embedding", "node"), **kwargs)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As calling the object, without blocking the event loop."""
        return await super().acall(listed(nodes, "embedding", "node"), **kwargs)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embed([query], "query")[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embed([text], "document")[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embed(texts, "document")

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return (await self._aembed([query], "query"))[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._aembed([text], "document"))[0]

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        while True:
            try:
                return await self._aembed(texts, "document")
            except EngineOverloadedError as error:
                # The queue may be full of other batches of the same corpus, so waiting helps.
                await asyncio.sleep(error.retry_after)

    def _embed(self, texts: list[str], role: Role) -> list[list[float]]:
        engine = self._engine()
        return engine.embed(texts, **self._options(engine, role)).tolist()

    async def _aembed(self, texts: list[str], role: Role) -> list[list[float]]:
        engine = await self._aengine()
        from millpond import AsyncEngine  # imports torch, which loading has imported already

        output = await AsyncEngine(engine).embed(texts, **self._options(engine, role))
        return await output.atolist()

    def _options(self, engine: Engine, role: Role) -> dict[str, Any]:
        prompts = {
            "query": PromptOptions(text=self.query_prompt, name=self.query_prompt_name),
            "document": PromptOptions(text=self.document_prompt, name=self.document_prompt_name),
        }
        log_prompt_notice(
            engine.spec,
            query=prompts["query"],
            document=prompts["document"],
            normalize=self.normalize,
            pooling=self.pooling,
            replaced="HuggingFaceEmbedding",
        )
        prompt = prompts[role]
        return {
            "role": role,
            "prompt": None if prompt == PromptOptions() else role_prompt(engine.spec, role, prompt),
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "truncate": self.truncate,
            "long_texts": self.long_texts,
        }


def _identity(engine: Engine) -> str:
    """Everything that changes an engine's vectors, except prompts and widths, which are fields of the adapter."""
    return f"{engine.spec.fingerprint} {engine.dtype} normalize={engine.spec.normalize}"
