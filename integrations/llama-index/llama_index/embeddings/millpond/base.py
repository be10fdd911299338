"""MillpondEmbedding: LlamaIndex's embedding model over a millpond engine in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

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

from llama_index.embeddings.millpond.source import LlamaIndexSource
from llama_index.embeddings.millpond.text_lists import TextLists, listed
from millpond.compat.adapter import EmbeddingSource, PathStr
from millpond.errors import EngineOverloadedError

if TYPE_CHECKING:
    from llama_index.sparse_embeddings.millpond import MillpondSparseEmbedding
    from millpond import Engine


class MillpondEmbedding(TextLists, LlamaIndexSource, EmbeddingSource, BaseEmbedding):
    """Text embeddings by a model that runs in this process.

    With ``model_name=``, the model is loaded on first use, and all objects of one configuration share one engine, also
    after pickling. With ``engine=``, that engine is used. Texts and queries get the checkpoint's own prompts, if it has
    any. The async methods do not block the event loop.

    Every option that changes a vector is a public field, so that the cache key of an ``IngestionPipeline`` has it.
    ``cache=`` names a vector cache, whose keys (unlike those of ``embeddings_cache``) include model, role and width.

    The other fields: :class:`millpond.compat.adapter.EmbeddingSource` and the classes that it derives from.

    Attributes:
        model_name: Hub id or local folder; also accepted, and readable, as ``model``; the only positional argument.
        engine_identity: Written when an object with ``engine=`` is serialized: which engine it was.
        embed_batch_size: Texts per call of the engine, which forms its own batches, so larger is better.
        num_workers: Concurrent calls of the engine in ``aget_text_embedding_batch``.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    named = "model_name"

    model_name: PathStr = Field(default="", validation_alias=AliasChoices("model_name", "model"))
    engine_identity: str | None = None
    embed_batch_size: int = Field(default=2048, gt=0, le=2048)
    # Without a limit the base class would submit a whole corpus to the engine's bounded queue at once.
    num_workers: int | None = 16

    def __init__(self, *positional: str | os.PathLike[str], **options: Any) -> None:
        """From the fields, of which only ``model_name`` may be positional.

        Args:
            *positional: The model's name.
            **options: The fields.

        Raises:
            TypeError: More positional arguments, or the model twice.
            ValueError: An unknown or invalid option.
        """
        super().__init__(**self._with_positional(positional, options, "model_name"))

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
        options = {name: getattr(self, name) for name in self.loading}
        return MillpondSparseEmbedding(self.model_name, truncate=self.truncate, **options)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        engine, identity = self.engine, self.engine_identity
        if engine is None and identity is not None:
            raise ValueError(
                f"this was serialized with engine= (a {self.model_name}), which is not serialized; "
                "pass that engine: from_dict(data, engine=...)"
            )
        if engine is not None and identity is not None and identity != _identity(engine):
            raise ValueError(f"this was serialized with another engine than {engine!r}; pass one of the same settings")
        if identity is None:
            self._check_source()
        if engine is not None:
            self._check_loading()
            self.model_name = engine.spec.name
        return self

    @model_serializer(mode="wrap")
    def custom_model_dump(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """The public fields, the class's name and, with ``engine=``, the identity of the engine.

        The identity lets a pipeline's cache distinguish two engines of one model, and makes deserializing without the
        engine an error.

        Args:
            handler: pydantic's.
            info: pydantic's.

        Returns:
            The fields by name.
        """
        data: dict[str, Any] = handler(self)
        data["class_name"] = self.class_name()
        if self.engine is not None and "engine_identity" in data:
            data["engine_identity"] = _identity(self.engine)
        return data

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Set the ``embedding`` of every node, as a step of an ``IngestionPipeline``.

        Args:
            nodes: Nodes with text.
            **kwargs: As LlamaIndex passes them.

        Returns:
            The same nodes.

        Raises:
            TypeError: ``nodes`` is not a list of nodes.
            MillpondError: The model cannot be loaded, or a text cannot be embedded.
        """
        return super().__call__(listed(nodes, "embedding", "node"), **kwargs)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As calling the object, without blocking the event loop.

        Args:
            nodes: Nodes with text.
            **kwargs: As LlamaIndex passes them.

        Returns:
            The same nodes.

        Raises:
            TypeError: ``nodes`` is not a list of nodes.
            MillpondError: As calling the object.
        """
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


def _identity(engine: Engine) -> str:
    """Everything that changes an engine's vectors, except prompts and widths, which are fields of the adapter."""
    return f"{engine.spec.fingerprint} {engine.dtype} normalize={engine.spec.normalize}"
