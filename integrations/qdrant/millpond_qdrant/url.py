"""The entry point ``qdrant`` of ``millpond.sinks``: opens the sink of a URL ``qdrant+SCHEME:LOCATION#COLLECTION``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.client import check_exists
from millpond.ingest.sinks.database import database

if TYPE_CHECKING:
    from millpond_qdrant.sink import QdrantSink


class QdrantOptions(TypedDict, total=False):
    """The options of :class:`QdrantSink`.

    Attributes:
        dimensions: The widths to store and search; by default the width that ``embed`` returns (full, for nearly every
            model). A search without them uses every width that the collection has.
        fields: ``plain`` (``id``, ``text``, ``metadata``), ``langchain`` (``page_content``, ``metadata``, and ``id``)
            or ``llama_index`` (the fields of LlamaIndex's store). Each also has a ``content_hash``.
        timeout: Seconds a server has for a whole request, from connecting to the last byte of its answer.
        hybrid: Store sparse vectors too, named ``sparse``, and search by both.
        datatype: ``float32``, ``float16`` or ``uint8`` of the stored vectors (a server's). ``None`` is the
            collection's, and float32 in a new one. uint8 is for ``plain`` payloads: vectors are scaled to 0..255 and
            compared by Euclidean distance, of which scores are turned into cosine.
        index_quantization: ``scalar`` (a byte for each number), ``product`` (a byte for four) or ``binary`` (a bit for
            each): a copy in memory by which a server searches. ``None`` is the collection's, and none in a new one.
        rescore: Whether the hits of a quantized search are scored by the vectors themselves.
        oversampling: How many times ``k`` hits are scored then: by default 2 of scalar, 4 of product and 8 of binary
            quantization.
        on_disk: Whether a new collection's vectors are read from the disk.
        hnsw: ``m`` and ``ef_construct`` of a new collection's graph, ``ef`` of searches.
        indexes: Metadata keys to index on a server, with the type: ``keyword``, ``integer``, ``float``, ``bool``,
            ``datetime``, ``uuid``, ``text`` or ``geo``.
        prefer_grpc: Whether to talk gRPC to a server: less than a quarter of the bytes.
        grpc_port: The server's port for gRPC.
        batch: Most points of one request.
    """

    dimensions: Sequence[int] | None
    fields: str | None
    timeout: float
    hybrid: bool
    datatype: str | None
    index_quantization: str | None
    rescore: bool
    oversampling: float | None
    on_disk: bool | None
    hnsw: Mapping[str, int] | None
    indexes: Mapping[str, str] | None
    prefer_grpc: bool
    grpc_port: int
    batch: int | None


@database(
    options=QdrantOptions.__annotations__,
    urls=("qdrant+http://localhost:6333#docs", "qdrant+path:DIR#docs", "qdrant+memory:#docs"),
    variables=("QDRANT_",),
    datatypes=("float32", "float16", "uint8"),
    quantizations=("scalar", "product", "binary"),
    packages=("qdrant-client", "qdrant-edge-py"),
)
def sink_from_url(
    scheme: str, location: str, collection: str, *, must_exist: bool = False, **options: Unpack[QdrantOptions]
) -> QdrantSink:
    """Open ``qdrant+path:DIR#docs``, ``qdrant+memory:#docs``, ``qdrant+http://host:6333#docs`` or ``qdrant+https://...``.

    The options are those of :class:`QdrantSink`; ``must_exist`` refuses a folder that holds no database.
    """
    from millpond_qdrant.sink import QdrantSink  # the client, which a look at the options does not need

    match scheme:
        case "memory" if not location:
            address = ":memory:"
        case "path" if location:
            if must_exist:
                check_exists(location, database="Qdrant", marker="meta.json")
            address = location
        case "http" | "https" if location.startswith("//"):
            address = f"{scheme}:{location}"
        case _:
            raise InvalidRequestError(
                f"'qdrant+{scheme}:' does not name a Qdrant; write qdrant+path:DIR#docs, qdrant+memory:#docs "
                "or qdrant+http://host:6333#docs"
            )
    return QdrantSink(address, collection, **options)
