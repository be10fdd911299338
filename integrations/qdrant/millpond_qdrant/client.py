"""Qdrant's clients, whose documents are embedded by millpond engines in this process."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from pydantic import BaseModel
from qdrant_client import AsyncQdrantClient, QdrantClient
from qdrant_client.local.async_qdrant_local import AsyncQdrantLocal
from qdrant_client.local.qdrant_local import QdrantLocal
from qdrant_client.uploader.uploader import iter_batch

from millpond.errors import InvalidRequestError
from millpond_qdrant.inference import LocalModels
from millpond_qdrant.resolver import Resolver

if TYPE_CHECKING:
    from millpond import AsyncEngine, Engine

P = ParamSpec("P")
T = TypeVar("T")

TESTED = "1.20"  # whose resolution of documents, which is private, is known here

if version("qdrant-client").split(".")[:2] != TESTED.split("."):
    raise ImportError(
        f"qdrant-client {version('qdrant-client')} is installed, and millpond's clients know how {TESTED} resolves "
        f"documents: pip install 'qdrant-client=={TESTED}.*', or embed texts by an engine and pass their vectors"
    )


class _LocalInference:
    """What both clients have in common: the methods of qdrant-client's mixin over fastembed, over engines."""

    DEFAULT_BATCH_SIZE = 256  # points whose documents are embedded by one call of an engine
    cloud_inference: bool
    local_inference_batch_size: int | None
    _client: Any
    _inference_inspector: Any

    def __init__(
        self, *args: Any, engines: Mapping[str, Engine | AsyncEngine | Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.cloud_inference:
            raise InvalidRequestError(
                "cloud_inference=True has documents embedded by Qdrant's cloud; leave it out, or use QdrantClient"
            )
        on_server = not isinstance(self._client, QdrantLocal | AsyncQdrantLocal)
        self._local_models = LocalModels(engines, on_server=on_server)

    def get_embedding_size(self, model_name: str) -> int:
        """The width of a model's vectors, for ``VectorParams(size=)``.

        Args:
            model_name: The name of the model, as in a document.

        Returns:
            The width.

        Raises:
            InvalidRequestError: The model makes no vectors, or sparse ones.
        """
        return self._local_models.width(model_name)

    def _embed_models(
        self, raw_models: BaseModel | Iterable[BaseModel], is_query: bool = False, batch_size: int | None = None
    ) -> Iterable[BaseModel]:
        resolver = Resolver(self._inference_inspector.parser, self._local_models)
        yield from resolver.embed_models(raw_models, is_query, batch_size or self.DEFAULT_BATCH_SIZE)

    def _embed_models_strict(
        self,
        raw_models: Iterable[dict[str, BaseModel] | BaseModel],
        batch_size: int | None = None,
        parallel: int | None = None,  # processes, each of which would load the model: an engine uses all cores
    ) -> Iterable[BaseModel]:
        resolver = Resolver(self._inference_inspector.parser, self._local_models)
        for batch in iter_batch(raw_models, batch_size or self.DEFAULT_BATCH_SIZE):
            yield from resolver.embed_models_batch(batch)

    def _resolved(self, value: Any, is_query: bool) -> Any:
        """An argument with vectors in place of its documents."""
        found = self._embed_models(value, is_query, self.local_inference_batch_size)
        return next(iter(found)) if isinstance(value, BaseModel) else list(found)


def _in_thread(method: Callable[P, Awaitable[T]], *names: str, is_query: bool) -> Callable[P, Coroutine[Any, Any, T]]:
    """A method of the asynchronous client, which embeds the documents of these arguments in a thread first."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def resolving(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)
        client: Any = bound.arguments["self"]
        for name in names:
            value = bound.arguments.get(name)
            if value is not None and client._inference_inspector.inspect(value):
                bound.arguments[name] = await asyncio.to_thread(client._resolved, value, is_query)
        return await method(*bound.args, **bound.kwargs)

    return resolving


class MillpondQdrantClient(_LocalInference, QdrantClient):
    """``QdrantClient``, whose ``models.Document`` objects are embedded by millpond engines in this process.

    A document of a query has the role of a query, one of a point that of a document. Its ``model`` is a hub id or a
    folder: a dense embedder gives a vector, SPLADE a sparse one, ColBERT a multivector; BGE-M3 makes all three, by
    ``options={"task": "sparse_embed"}`` or ``"token_embed"``. Other options are ``prompt``, ``dimensions`` and the
    fields of :class:`millpond.compat.adapter.EmbeddingSource`. All clients of a process share the engines. The server
    itself counts the words of ``Qdrant/bm25``.

    Args:
        *args: The arguments of ``QdrantClient``.
        engines: For names of models, an engine to use, or options of one, as ``{"dtype": "float32"}``.
        **kwargs: The other arguments of ``QdrantClient``.

    Raises:
        InvalidRequestError: ``cloud_inference`` is set.
    """


class AsyncMillpondQdrantClient(_LocalInference, AsyncQdrantClient):
    """``AsyncQdrantClient`` with the documents of :class:`MillpondQdrantClient`; the event loop goes on meanwhile.

    Args:
        *args: The arguments of ``AsyncQdrantClient``.
        engines: As of :class:`MillpondQdrantClient`.
        **kwargs: The other arguments of ``AsyncQdrantClient``.
    """

    query_points = _in_thread(AsyncQdrantClient.query_points, "query", "prefetch", is_query=True)
    query_points_groups = _in_thread(AsyncQdrantClient.query_points_groups, "query", "prefetch", is_query=True)
    query_batch_points = _in_thread(AsyncQdrantClient.query_batch_points, "requests", is_query=True)
    upsert = _in_thread(AsyncQdrantClient.upsert, "points", is_query=False)
    update_vectors = _in_thread(AsyncQdrantClient.update_vectors, "points", is_query=False)
    batch_update_points = _in_thread(AsyncQdrantClient.batch_update_points, "update_operations", is_query=False)
