"""MillpondEmbeddingFunction: Chroma's embedding function over a millpond engine in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from chromadb.api import ClientAPI
from chromadb.api.types import Documents, EmbeddingFunction, Embeddings, Space
from chromadb.errors import NotFoundError
from chromadb.utils.embedding_functions import register_embedding_function

from millpond.compat.composed import Embedder
from millpond.errors import InvalidRequestError
from millpond.tasks import Role
from millpond_chroma.model_function import ModelFunction

_SPACES: Mapping[str, Space] = {"cosine": "cosine", "dot": "ip", "euclidean": "l2", "manhattan": "l2"}


@register_embedding_function
class MillpondEmbeddingFunction(ModelFunction[Embedder], EmbeddingFunction[Documents]):
    """Embeds documents and queries of a collection by a model that runs in this process.

    Documents and queries get the checkpoint's own prompts, if it has any.

    Args:
        model: Hub id or local folder.
        identity: What Chroma stored of the model; leave it out.
        **options: The fields of :class:`millpond.compat.adapter.EmbeddingSource` and the classes that it derives from,
            as ``dimensions``, ``normalize`` and ``engine``.

    Raises:
        MillpondError: The model cannot be loaded, or is not that of the collection.
        ValueError: An option that is unknown or not valid.
    """

    source = Embedder

    def __init__(self, model: str | None = None, *, identity: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._load(model, identity, options)

    def __call__(self, input: Documents) -> Embeddings:
        """The vectors of documents.

        Args:
            input: Texts.

        Returns:
            For each text ``[d]`` float32.
        """
        return self._vectors(input, "document")

    def embed_query(self, input: Documents) -> Embeddings:
        """The vectors of queries.

        Args:
            input: Texts.

        Returns:
            For each text ``[d]`` float32.
        """
        return self._vectors(input, "query")

    @staticmethod
    def name() -> str:
        """The name in Chroma's registry.

        Returns:
            ``"millpond"``.
        """
        return "millpond"

    def default_space(self) -> Space:
        """The similarity that the checkpoint names, and the cosine if it names none.

        Returns:
            A space of Chroma.
        """
        return _SPACES[self._source.load().spec.similarity]

    def supported_spaces(self) -> list[Space]:
        """The spaces that a collection may have.

        Returns:
            All of Chroma's.
        """
        return ["cosine", "l2", "ip"]

    def _vectors(self, input: Documents, role: Role) -> Embeddings:
        return list(np.asarray(self._source.embed(list(input), role).embeddings, np.float32))


def open_collection(client: ClientAPI, name: str, function: MillpondEmbeddingFunction, **created: Any) -> Any:
    """A collection, which is created unless it exists; one of another model is refused.

    Chroma itself compares only the names of functions, so ``get_collection`` takes any of this package for any model.

    Args:
        client: A client of chromadb.
        name: Name of the collection.
        function: The function.
        **created: Arguments of ``create_collection``, for a new one.

    Returns:
        The collection.

    Raises:
        FingerprintMismatchError: The collection was built by another model, or with other options.
        InvalidRequestError: The collection was made without a function of millpond.
    """
    try:
        found = client.get_collection(name, embedding_function=None)
    except NotFoundError:
        return client.create_collection(name, embedding_function=function, **created)
    stored = found.configuration_json.get("embedding_function") or {}
    if stored.get("name") != function.name():
        raise InvalidRequestError(
            f"collection {name!r} has the embedding function {stored.get('name')!r}, not {function.name()!r}; choose "
            "another collection name"
        )
    function.validate_config_update(stored["config"], function.get_config())
    return client.get_collection(name, embedding_function=function)
