"""LocalModels: the vectors of documents, by engines of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from qdrant_client import models

from millpond.compat.composed import Embedder, SparseEmbedder, TokenEmbedder
from millpond.errors import InvalidRequestError, UnsupportedTaskError

if TYPE_CHECKING:
    from millpond import AsyncEngine, Engine

VectorTask = Literal["embed", "sparse_embed", "token_embed"]
Source = Embedder | SparseEmbedder | TokenEmbedder

_TASKS: tuple[VectorTask, ...] = get_args(VectorTask)
_SOURCES: Mapping[VectorTask, type[Source]] = {
    "embed": Embedder,
    "sparse_embed": SparseEmbedder,
    "token_embed": TokenEmbedder,
}
# As qdrant-client writes the vectors of each source's output.
_WRITTEN: Mapping[VectorTask, Callable[[Any], list[Any]]] = {
    "embed": lambda output: output.tolist(),
    "sparse_embed": lambda rows: [models.SparseVector(indices=list(row), values=list(row.values())) for row in rows],
    "token_embed": lambda output: [matrix.tolist() for matrix in output.embeddings],
}
_COUNTS_WORDS = "qdrant/bm25"  # which a server does itself


class LocalModels:
    """The models that documents name.

    Args:
        engines: For names of models, an engine or the options of one.
        on_server: Whether the points are on a server, and not in local mode.
    """

    def __init__(
        self, engines: Mapping[str, Engine | AsyncEngine | Mapping[str, Any]] | None, *, on_server: bool
    ) -> None:
        self._engines = dict(engines or {})
        self._on_server = on_server

    def embed(self, name: str, texts: Sequence[str], options: Any = None, *, is_query: bool) -> list[Any]:
        """The vectors of documents of one model.

        Args:
            name: The name of the model.
            texts: The texts.
            options: The options of the documents.
            is_query: Whether they stand in a query.

        Returns:
            For each text a dense vector, a sparse vector or a multivector; what a server embeds itself, as it was.
        """
        if name.lower() == _COUNTS_WORDS:
            return self._left_to_server(name, texts, options)
        role: Literal["query", "document"] = "query" if is_query else "document"
        given = dict(options or {})
        if "prompt" in given:
            given[f"{role}_prompt"] = given.pop("prompt")
        task, source = self._source(name, given)
        return _WRITTEN[task](source.embed(texts, role))

    def width(self, name: str) -> int:
        """The width of a model's vectors.

        Args:
            name: The name of the model.

        Returns:
            Columns of a dense vector, or of a row of a multivector.
        """
        _, source = self._source(name, {})
        if isinstance(source, SparseEmbedder):
            raise InvalidRequestError(f"model={name!r} makes sparse vectors, which have no width")
        spec, dimensions = source.load().spec, source.dimensions
        if isinstance(source, Embedder):
            return spec.check_dimensions(dimensions)
        return spec.hidden_size if dimensions is None else dimensions

    def _source(self, name: str, options: Mapping[str, Any]) -> tuple[VectorTask, Source]:
        """The task of a document, by its option ``task`` or by what the model is made for, and its model."""
        known = self._engines.get(name, {})
        merged = {
            "model": name,
            **(known if isinstance(known, Mapping) else {"model": None, "engine": known}),
            **options,
        }
        task = merged.pop("task", None)
        if task is not None and task not in _TASKS:
            raise InvalidRequestError(f"task={task!r} of model={name!r} makes no vectors; choose {', '.join(_TASKS)}")
        if task is None:
            places = {key: value for key, value in merged.items() if key in {"model", "engine", *Embedder.loading}}
            tasks = Embedder(**places).load().tasks
            task = next((each for each in _TASKS if each in tasks), None)
            if task is None:
                raise UnsupportedTaskError(
                    f"model={name!r} makes no vectors (it serves {', '.join(sorted(tasks))}); name an embedder, a "
                    "SPLADE or a ColBERT checkpoint"
                )
        return task, _SOURCES[task](**merged)

    def _left_to_server(self, name: str, texts: Sequence[str], options: Any) -> list[Any]:
        if not self._on_server:
            raise InvalidRequestError(
                f"model={name!r} counts words, which a server of Qdrant does itself and local mode does not; name a "
                "SPLADE checkpoint or BAAI/bge-m3, or use a server"
            )
        return [models.Document(text=text, model=name, options=options) for text in texts]
