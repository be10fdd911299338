"""MillpondEmbedding: LlamaIndex's embedding model over a millpond engine in this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from pydantic import SerializationInfo, SerializerFunctionWrapHandler, model_serializer

from llama_index.embeddings.millpond.source import TextSource
from millpond.compat.adapter import EmbeddingSource

if TYPE_CHECKING:
    from llama_index.sparse_embeddings.millpond import MillpondSparseEmbedding
    from millpond import Engine


class MillpondEmbedding(EmbeddingSource, TextSource, BaseEmbedding):
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

    engine_identity: str | None = None

    def __init__(self, *positional: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(*positional, **options)  # type checkers would take it for one without positional arguments

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

    def _check_source(self) -> None:
        engine, identity = self.engine, self.engine_identity
        if engine is None and identity is not None:
            raise ValueError(
                f"this was serialized with engine= (a {self.model_name}), which is not serialized; "
                "pass that engine: from_dict(data, engine=...)"
            )
        if engine is not None and identity is not None:
            if identity != _identity(engine):
                raise ValueError(
                    f"this was serialized with another engine than {engine!r}; pass one of the same settings"
                )
            self.model_name = ""  # as it was written
        super()._check_source()
        if engine is not None:
            self.model_name = engine.spec.name

    @model_serializer(mode="wrap")
    def custom_model_dump(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """The public fields by name, the class's name and, with ``engine=``, the identity of the engine.

        The identity lets a pipeline's cache distinguish two engines of one model, and makes deserializing without the
        engine an error.

        Args:
            handler: Pydantic's own serializer.
            info: Accepted because pydantic passes it, and ignored.

        Returns:
            What pydantic dumps, with ``class_name`` and, with ``engine=``, ``engine_identity``.
        """
        data: dict[str, Any] = handler(self)
        data["class_name"] = self.class_name()
        if self.engine is not None and "engine_identity" in data:
            data["engine_identity"] = _identity(self.engine)
        return data


def _identity(engine: Engine) -> str:
    """Everything that changes an engine's vectors, except prompts and widths, which are fields of the adapter."""
    return f"{engine.spec.fingerprint} {engine.dtype} normalize={engine.spec.normalize}"
