"""TextLists: the methods of LlamaIndex's embeddings that take a list, which a str must not be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel

_PLURALS = {"query": "queries"}


def listed(value: Iterable[Any], method: str, of: str) -> list[Any]:
    """What the caller passed, as a list.

    Args:
        value: What the caller passed as a list.
        method: The caller's method, for the message.
        of: What the list holds, for example ``text``.

    Raises:
        TypeError: A str, which would be read character by character, or another single item.
    """
    if isinstance(value, str | bytes | Mapping | BaseModel) or not isinstance(value, Iterable):
        raise TypeError(
            f"{method} takes a list of {_PLURALS.get(of, of + 's')}, not a {type(value).__name__}; "
            f"write {method}([{of}])"
        )
    return list(value)


class TextLists:
    """Comes before LlamaIndex's base class, which reads a str as a list of characters."""

    def get_text_embedding_batch(self, texts: list[str], show_progress: bool = False, **kwargs: Any) -> Any:
        """One embedding for each text, in batches of ``embed_batch_size``.

        Raises:
            TypeError: ``texts`` is not a list.
            MillpondError: The model cannot be loaded, or a text cannot be embedded; the message says which and why.
        """
        texts = listed(texts, "get_text_embedding_batch", "text")
        return super().get_text_embedding_batch(texts, show_progress, **kwargs)  # type: ignore[misc]

    async def aget_text_embedding_batch(self, texts: list[str], show_progress: bool = False, **kwargs: Any) -> Any:
        """As ``get_text_embedding_batch``, without blocking the event loop."""
        texts = listed(texts, "aget_text_embedding_batch", "text")
        return await super().aget_text_embedding_batch(texts, show_progress, **kwargs)  # type: ignore[misc]

    def get_agg_embedding_from_queries(self, queries: list[str], agg_fn: Callable[..., Any] | None = None) -> Any:
        """The embeddings of several queries as one: their mean, or what ``agg_fn`` makes of them.

        Raises:
            TypeError: ``queries`` is not a list.
        """
        queries = listed(queries, "get_agg_embedding_from_queries", "query")
        return super().get_agg_embedding_from_queries(queries, agg_fn)  # type: ignore[misc]

    async def aget_agg_embedding_from_queries(
        self, queries: list[str], agg_fn: Callable[..., Any] | None = None
    ) -> Any:
        """As ``get_agg_embedding_from_queries``, without blocking the event loop."""
        queries = listed(queries, "aget_agg_embedding_from_queries", "query")
        return await super().aget_agg_embedding_from_queries(queries, agg_fn)  # type: ignore[misc]
