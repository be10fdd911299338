"""What every adapter of LlamaIndex adds to the fields that all frameworks share."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from millpond.compat.adapter import EngineSource, PathStr
from millpond.errors import EngineOverloadedError
from millpond.tasks import Role

_logger = logging.getLogger(__name__)


@cache
def _tell_worker(process: int) -> None:
    """Log once in a worker process, such as those of a pipeline's ``num_workers``, what it costs."""
    if multiprocessing.parent_process() is not None:
        _logger.warning(
            "process %d is a worker process and loads a model of its own; one process with one engine uses the whole "
            "machine, so leave out num_workers",
            process,
        )


def listed(value: Iterable[Any], method: str, of: str) -> list[Any]:
    """What was passed as a list; TypeError for a str, which is no list of characters, or another single item."""
    if isinstance(value, str | bytes | Mapping | BaseModel) or not isinstance(value, Iterable):
        kind = type(value).__name__
        raise TypeError(f"{method} takes a list of {of}, not a {kind}; write {method}([...])")
    return list(value)


class LlamaIndexSource(EngineSource):
    """Positional arguments, and the name in serialized data."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    replaced = "HuggingFaceEmbedding"

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialized data."""
        return cls.__name__

    @classmethod
    def _with_positional(cls, positional: tuple[Any, ...], options: dict[str, Any], *names: str) -> dict[str, Any]:
        """The options with the positional arguments under their names."""
        if len(positional) > len(names):
            raise TypeError(
                f"{cls.__name__} takes {' and '.join(names)} without their names, and got {len(positional)} "
                f"positional arguments: {positional!r}; pass the others by name"
            )
        for name, value in zip(names, positional, strict=False):
            for spelling in ("model", "model_name") if name == cls.named else (name,):
                if spelling in options:
                    raise TypeError(
                        f"{cls.__name__} got {name} twice: {value!r} and {spelling}={options[spelling]!r}; pass one"
                    )
            options[name] = value
        return options

    def _configuration(self) -> dict[str, Any]:
        _tell_worker(os.getpid())
        return super()._configuration()


class TextSource(LlamaIndexSource):
    """Comes before LlamaIndex's base class of an adapter that makes one result of each text, by ``_embed``.

    Attributes:
        model_name: Hub id or local folder; also accepted, and readable, as ``model``; the only positional argument.
        embed_batch_size: Texts per call of the engine, which forms its own batches, so larger is better.
        num_workers: Concurrent calls of the engine in ``aget_text_embedding_batch``.
    """

    named = "model_name"

    model_name: PathStr = Field(default="", validation_alias=AliasChoices("model_name", "model"))
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

    @property
    def model(self) -> str:
        """``model_name``."""
        return self.model_name

    # LlamaIndex's base class reads a str as a list of characters.

    def get_text_embedding_batch(self, texts: list[str], show_progress: bool = False, **kwargs: Any) -> Any:
        """As in LlamaIndex, in batches of ``embed_batch_size``."""
        texts = listed(texts, "get_text_embedding_batch", "texts")
        return super().get_text_embedding_batch(texts, show_progress, **kwargs)  # type: ignore[misc]

    async def aget_text_embedding_batch(self, texts: list[str], show_progress: bool = False, **kwargs: Any) -> Any:
        """As ``get_text_embedding_batch``; it does not block the loop."""
        texts = listed(texts, "aget_text_embedding_batch", "texts")
        return await super().aget_text_embedding_batch(texts, show_progress, **kwargs)  # type: ignore[misc]

    def get_agg_embedding_from_queries(self, queries: list[str], agg_fn: Callable[..., Any] | None = None) -> Any:
        """One embedding of several queries, by default their mean."""
        queries = listed(queries, "get_agg_embedding_from_queries", "queries")
        return super().get_agg_embedding_from_queries(queries, agg_fn)  # type: ignore[misc]

    async def aget_agg_embedding_from_queries(
        self, queries: list[str], agg_fn: Callable[..., Any] | None = None
    ) -> Any:
        """As ``get_agg_embedding_from_queries``; it does not block the loop."""
        queries = listed(queries, "aget_agg_embedding_from_queries", "queries")
        return await super().aget_agg_embedding_from_queries(queries, agg_fn)  # type: ignore[misc]

    def _embed(self, texts: list[str], role: Role) -> list[Any]:
        raise NotImplementedError

    async def _aembed(self, texts: list[str], role: Role) -> list[Any]:
        raise NotImplementedError

    def _get_query_embedding(self, query: str) -> Any:
        return self._embed([query], "query")[0]

    def _get_text_embedding(self, text: str) -> Any:
        return self._embed([text], "document")[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[Any]:
        return self._embed(texts, "document")

    async def _aget_query_embedding(self, query: str) -> Any:
        return (await self._aembed([query], "query"))[0]

    async def _aget_text_embedding(self, text: str) -> Any:
        return (await self._aembed([text], "document"))[0]

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Any]:
        while True:
            try:
                return await self._aembed(texts, "document")
            except EngineOverloadedError as error:
                # The queue may be full of other batches of the same corpus, so waiting helps.
                await asyncio.sleep(error.retry_after)
