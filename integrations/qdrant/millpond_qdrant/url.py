"""The entry point ``qdrant`` of ``millpond.sinks``: opens the sink of a URL ``qdrant+SCHEME:LOCATION#COLLECTION``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.database import database
from millpond.ingest.sinks.location import check_exists, is_address, url_of

if TYPE_CHECKING:
    from millpond_qdrant.sink import QdrantSink


class QdrantOptions(TypedDict, total=False):
    """The options of :class:`QdrantSink`, which describes them."""

    dimensions: Sequence[int] | None
    fields: str
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
            if is_address(location):
                folder = "./NAME" if "@" in location else f"./{location}"  # what is before an @ might be a password
                raise InvalidRequestError(
                    "'qdrant+path:' takes a folder, and this looks like the address of a server; write "
                    f"qdrant+{url_of(location, port=6333)}#{collection} for it, or qdrant+path:{folder}#{collection} "
                    "for a folder of this name"
                )
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
