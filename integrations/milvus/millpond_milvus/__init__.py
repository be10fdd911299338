"""millpond's vectors in Milvus."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millpond_milvus.url import sink_from_url

if TYPE_CHECKING:
    from millpond_milvus.export import ParquetExport
    from millpond_milvus.functions import MillpondEmbeddingFunction, MillpondRerankFunction, RerankResult
    from millpond_milvus.index import MilvusIndex
    from millpond_milvus.sink import MilvusSink

_MODULES = {
    "MillpondEmbeddingFunction": "functions",
    "MillpondRerankFunction": "functions",
    "MilvusIndex": "index",
    "MilvusSink": "sink",
    "ParquetExport": "export",
    "RerankResult": "functions",
}

__all__ = [
    "MillpondEmbeddingFunction",
    "MillpondRerankFunction",
    "MilvusIndex",
    "MilvusSink",
    "ParquetExport",
    "RerankResult",
    "sink_from_url",
]


def __getattr__(name: str) -> Any:
    """Import what needs the client only when it is used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
