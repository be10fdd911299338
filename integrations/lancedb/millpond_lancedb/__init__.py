"""millpond's vectors in LanceDB. Importing a class that is no sink registers the embedding function "millpond"."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millpond_lancedb.url import sink_from_url

if TYPE_CHECKING:
    from millpond_lancedb.embeddings import MillpondEmbeddings
    from millpond_lancedb.reranker import MillpondReranker
    from millpond_lancedb.sink import LanceDBSink

__all__ = ["LanceDBSink", "MillpondEmbeddings", "MillpondReranker", "sink_from_url"]

_MODULES = {"LanceDBSink": "sink", "MillpondEmbeddings": "embeddings", "MillpondReranker": "reranker"}


def __getattr__(name: str) -> Any:
    """Import what needs the client only when it is used: the commands read the URLs of every installed database."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "LanceDBSink":
        import_module(f"{__name__}.embeddings")  # registers
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
