"""The entry point ``qdrant`` of ``millpond.sinks``: opens the sink of a URL ``qdrant+SCHEME:LOCATION#COLLECTION``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millpond.errors import InvalidRequestError
from millpond.ingest.location import check_exists, is_address, url_of
from millpond_qdrant.sink import QdrantSink


def sink_from_url(
    scheme: str,
    location: str,
    collection: str,
    *,
    dimensions: Sequence[int] | None = None,
    payload: str = "plain",
    timeout: float = 60,
    hybrid: bool = False,
    datatype: str | None = None,
    quantization: str | None = None,
    rescore: bool = True,
    oversampling: float | None = None,
    on_disk: bool | None = None,
    hnsw: Mapping[str, int] | None = None,
    indexes: Mapping[str, str] | None = None,
    prefer_grpc: bool = False,
    grpc_port: int = 6334,
    batch: int | None = None,
    must_exist: bool = False,
) -> QdrantSink:
    """Open ``qdrant+path:DIR#docs``, ``qdrant+memory:#docs``, ``qdrant+http://host:6333#docs`` or ``qdrant+https://...``.

    The options are those of :class:`QdrantSink`; ``must_exist`` refuses a folder that holds no database.
    """
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
    return QdrantSink(
        address,
        collection,
        dimensions=dimensions,
        payload=payload,
        timeout=timeout,
        hybrid=hybrid,
        datatype=datatype,
        quantization=quantization,
        rescore=rescore,
        oversampling=oversampling,
        on_disk=on_disk,
        hnsw=hnsw,
        indexes=indexes,
        prefer_grpc=prefer_grpc,
        grpc_port=grpc_port,
        batch=batch,
    )
