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
        """The embeddings of texts, in batches of ``embed_batch_size``.

        Args:
            texts: Any number of texts.
            show_progress: Draw a bar.
            **kwargs: As LlamaIndex passes them.

        Returns:
            One embedding for each text, in order.

        Raises:
            TypeError: ``texts`` is not a list.
            MillpondError: The model cannot be loaded, or a text cannot be embedded; the message says which and why.
        """
        texts = listed(texts, "get_text_embedding_batch", "text")
        return super().get_text_embedding_batch(texts, show_progress, **kwargs)  # type: ignore[misc]

    async def aget_text_embedding_batch(self, texts: list[str], show_progress: bool = False, **kwargs: Any) -> Any:
        """As ``get_text_embedding_batch`` with the same arguments, result and errors; it does not block the loop."""
        texts = listed(texts, "aget_text_embedding_batch", "text")
        return await super().aget_text_embedding_batch(texts, show_progress, **kwargs)  # type: ignore[misc]

    def get_agg_embedding_from_queries(self, queries: list[str], agg_fn: Callable[..., Any] | None = None) -> Any:
        """The embeddings of several queries as one.

        Args:
            queries: Any number of queries.
            agg_fn: Makes one of several; by default their mean.

        Returns:
            One embedding.

        Raises:
            TypeError: ``queries`` is not a list.
            MillpondError: As ``get_text_embedding_batch``.
        """
        queries = listed(queries, "get_agg_embedding_from_queries", "query")
        return super().get_agg_embedding_from_queries(queries, agg_fn)  # type: ignore[misc]

    async def aget_agg_embedding_from_queries(
        self, queries: list[str], agg_fn: Callable[..., Any] | None = None
    ) -> Any:
        """As ``get_agg_embedding_from_queries`` with the same arguments, result and errors; it awaits the engine."""
        queries = listed(queries, "aget_agg_embedding_from_queries", "query")
        return await super().aget_agg_embedding_from_queries(queries, agg_fn)  # type: ignore[misc]
