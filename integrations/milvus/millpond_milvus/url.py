"""The entry point ``milvus`` of ``millpond.sinks``: opens the sink of a URL ``milvus+SCHEME:LOCATION#COLLECTION``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.client import check_exists
from millpond.ingest.sinks.database import database

if TYPE_CHECKING:
    from millpond_milvus.export import ParquetExport
    from millpond_milvus.sink import MilvusSink


class MilvusOptions(TypedDict, total=False):
    """The options of :class:`MilvusSink`.

    Attributes:
        dimensions: The widths to store and search; by default the width that ``embed`` returns (full, for nearly every
            model). A search without them uses every width that the collection has.
        fields: ``plain`` (fields ``pk``, ``id``, ``text``, ``metadata``, ``content_hash``), ``langchain`` (``pk``,
            ``text``, the metadata's keys, ``record_id``, ``content_hash``) or ``llama_index`` (the fields of
            LlamaIndex's store).
        timeout: Seconds that any call of the client may take, with all that it sends and repeats.
        hybrid: ``True`` stores the sparse vectors of an engine in the field ``sparse``; ``"bm25"`` lets Milvus make
            them of the text, for which a search needs no sparse engine.
        datatype: How a server stores vectors: ``float32``, ``float16``, ``bfloat16`` (needs ml_dtypes) or ``int8``.
        index_type: A server's index: ``AUTOINDEX``, ``FLAT``, ``HNSW`` or ``IVF``.
        index_quantization: Of a server's index: ``scalar`` (HNSW_SQ, IVF_SQ8), ``product`` (HNSW_PQ, IVF_PQ) or
            ``binary`` (IVF_RABITQ).
        partition_key: A metadata key with str values, by which rows are put together; a filter on it reads only theirs.
        partitions: How many partitions there are for its values, 16 by default.
    """

    dimensions: Sequence[int] | None
    fields: str | None
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

    given: dict[str, Any] = {**options}
    given.pop("timeout", None)  # of a server
    for name in ("index_type", "index_quantization", "partitions"):
        if (value := given.pop(name, None)) is not None:
            raise InvalidRequestError(
                f"{name}={value!r}: Parquet files hold rows and no index; leave it out, and pass it to the MilvusSink "
                "that makes the collection"
            )
    return ParquetExport(folder, collection, **given)
