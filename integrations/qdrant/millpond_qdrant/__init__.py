"""millpond's vectors in Qdrant."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millpond_qdrant.url import sink_from_url

if TYPE_CHECKING:
    from millpond_qdrant.client import AsyncMillpondQdrantClient, MillpondQdrantClient
    from millpond_qdrant.index import QdrantIndex
    from millpond_qdrant.sink import QdrantSink

_MODULES = {
    "AsyncMillpondQdrantClient": "client",
    "MillpondQdrantClient": "client",
    "QdrantIndex": "index",
    "QdrantSink": "sink",
}

__all__ = ["AsyncMillpondQdrantClient", "MillpondQdrantClient", "QdrantIndex", "QdrantSink", "sink_from_url"]


def __getattr__(name: str) -> Any:
    """Import what needs the client only when it is used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
