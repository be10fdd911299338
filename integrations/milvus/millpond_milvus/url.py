"""The entry point ``milvus`` of ``millpond.sinks``: opens the sink of a URL ``milvus+SCHEME:LOCATION#COLLECTION``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from millpond.errors import InvalidRequestError
from millpond.ingest.location import check_exists, is_address, url_of
from millpond_milvus.export import ParquetExport
from millpond_milvus.sink import MilvusSink


def sink_from_url(
    scheme: str,
    location: str,
    collection: str,
    *,
    dimensions: Sequence[int] | None = None,
    payload: str = "plain",
    timeout: float = 60,
    hybrid: bool | Literal["bm25"] = False,
    datatype: str = "float32",
    index_type: str | None = None,
    quantization: str | None = None,
    partition_key: str | None = None,
    partitions: int | None = None,
    must_exist: bool = False,
) -> MilvusSink | ParquetExport:
    """Open ``milvus+file:X.db#docs``, ``milvus+http://host:19530#docs`` or ``milvus+parquet:DIR#docs``.

    Args:
        scheme: What the location is.
        location: A file, the address of a server, or a folder for Parquet files.
        collection: Name of the collection.
        dimensions: As :class:`MilvusSink`, as the others are.
        payload: The form of the payload.
        timeout: Seconds that a call may take; has no effect on Parquet files.
        hybrid: Whether sparse vectors are stored, and whose.
        datatype: How vectors are stored.
        index_type: A server's index.
        quantization: Of a server's index.
        partition_key: A metadata key, by whose value rows are put together.
        partitions: How many partitions it has.
        must_exist: Refuse a file that is not there.

    Raises:
        InvalidRequestError: The scheme is unknown, or one of the others is not valid.
    """
    match scheme:
        case "parquet" if location:
            for name, value in (("index_type", index_type), ("quantization", quantization), ("partitions", partitions)):
                if value is not None:
                    raise InvalidRequestError(
                        f"{name}={value!r}: Parquet files hold rows and no index; leave it out, and pass it to the "
                        "MilvusSink that makes the collection"
                    )
            return ParquetExport(
                location,
                collection,
                dimensions=dimensions,
                payload=payload,
                hybrid=hybrid,
                datatype=datatype,
                partition_key=partition_key,
            )
        case "file" if location:
            if is_address(location):
                raise InvalidRequestError(
                    "'milvus+file:' takes a file, and this looks like the address of a server; write "
                    f"milvus+{url_of(location, port=19530)}#{collection} for it, or milvus+file:./NAME.db#{collection} "
                    "for a file of Milvus Lite"
                )
            if must_exist:
                check_exists(location, database="Milvus Lite")
            address = location
        case "http" | "https" if location.startswith("//"):
            address = f"{scheme}:{location}"
        case _:
            raise InvalidRequestError(
                f"'milvus+{scheme}:' does not name a Milvus; write milvus+file:X.db#docs, "
                "milvus+http://host:19530#docs or milvus+parquet:DIR#docs"
            )
    return MilvusSink(
        address,
        collection,
        dimensions=dimensions,
        payload=payload,
        timeout=timeout,
        hybrid=hybrid,
        datatype=datatype,
        index_type=index_type,
        quantization=quantization,
        partition_key=partition_key,
        partitions=partitions,
    )
