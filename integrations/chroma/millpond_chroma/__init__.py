"""millpond's vectors in Chroma.

Chroma finds the embedding functions of a stored collection once they are imported from here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millpond_chroma.url import sink_from_url

if TYPE_CHECKING:
    from millpond_chroma.dense import MillpondEmbeddingFunction, open_collection
    from millpond_chroma.sink import ChromaSink
    from millpond_chroma.sparse import MillpondSparseEmbeddingFunction

_HOMES = {
    "ChromaSink": "sink",
    "MillpondEmbeddingFunction": "dense",
    "MillpondSparseEmbeddingFunction": "sparse",
    "open_collection": "dense",
}

__all__ = [
    "ChromaSink",
    "MillpondEmbeddingFunction",
    "MillpondSparseEmbeddingFunction",
    "open_collection",
    "sink_from_url",
]


def __getattr__(name: str) -> Any:
    """Import what needs the client only when it is used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"millpond_chroma.{_HOMES[name]}"), name)
