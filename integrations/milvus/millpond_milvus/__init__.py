"""millpond's vectors in Milvus."""

from millpond_milvus.export import ParquetExport
from millpond_milvus.functions import MillpondEmbeddingFunction, MillpondRerankFunction, RerankResult
from millpond_milvus.index import MilvusIndex
from millpond_milvus.sink import MilvusSink
from millpond_milvus.url import sink_from_url

__all__ = [
    "MillpondEmbeddingFunction",
    "MillpondRerankFunction",
    "MilvusIndex",
    "MilvusSink",
    "ParquetExport",
    "RerankResult",
    "sink_from_url",
]
