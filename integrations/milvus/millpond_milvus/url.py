"""The entry point ``milvus`` of ``millpond.sinks``: opens the sink of a URL ``milvus+SCHEME:LOCATION#COLLECTION``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.database import database
from millpond.ingest.sinks.location import check_exists, is_address, url_of

if TYPE_CHECKING:
    from millpond_milvus.export import ParquetExport
    from millpond_milvus.sink import MilvusSink


class MilvusOptions(TypedDict, total=False):
    """The options of :class:`MilvusSink`, which describes them."""

    dimensions: Sequence[int] | None
    fields: str
    timeout: float
    hybrid: bool | Literal["bm25"]
    datatype: str
    index_type: str | None
    index_quantization: str | None
    partition_key: str | None
    partitions: int | None


@database(
    options=MilvusOptions.__annotations__,
    urls=("milvus+http://localhost:19530#docs", "milvus+file:X.db#docs", "milvus+parquet:DIR#docs"),
    variables=("MILVUS_",),
    datatypes=("float32", "float16", "bfloat16", "int8"),
    packages=("pymilvus", "milvus-lite"),
)
def sink_from_url(
    scheme: str, location: str, collection: str, *, must_exist: bool = False, **options: Unpack[MilvusOptions]
) -> MilvusSink | ParquetExport:
    """Open ``milvus+file:X.db#docs``, ``milvus+http://host:19530#docs`` or ``milvus+parquet:DIR#docs``.

    The options are those of :class:`MilvusSink`; ``must_exist`` refuses a file that is not there.
    """
    from millpond_milvus.sink import MilvusSink  # the client, which a look at the options does not need

    match scheme:
        case "parquet" if location:
            return _export(location, collection, options)
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
    return MilvusSink(address, collection, **options)


def _export(folder: str, collection: str, options: MilvusOptions) -> ParquetExport:
    from millpond_milvus.export import ParquetExport

    for name in ("index_type", "index_quantization", "partitions"):
        if (value := options.get(name)) is not None:
            raise InvalidRequestError(
                f"{name}={value!r}: Parquet files hold rows and no index; leave it out, and pass it to the MilvusSink "
                "that makes the collection"
            )
    return ParquetExport(
        folder,
        collection,
        dimensions=options.get("dimensions"),
        fields=options.get("fields", "plain"),
        hybrid=options.get("hybrid", False),
        datatype=options.get("datatype", "float32"),
        partition_key=options.get("partition_key"),
    )
