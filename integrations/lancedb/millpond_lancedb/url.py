"""The entry point ``lancedb`` of ``millpond.sinks``: opens the sink of a URL ``lancedb+path:DIR#TABLE``."""

from collections.abc import Sequence

from millpond.errors import InvalidRequestError
from millpond.ingest.location import check_exists
from millpond_lancedb.sink import LanceDBSink


def sink_from_url(
    scheme: str,
    location: str,
    collection: str,
    *,
    dimensions: Sequence[int] | None = None,
    payload: str = "plain",
    datatype: str = "float32",
    index: str | None = None,
    must_exist: bool = False,
) -> LanceDBSink:
    """Open ``lancedb+path:DIR#docs``; ``must_exist`` refuses a folder that is not there."""
    if scheme != "path" or not location:
        raise InvalidRequestError(f"'lancedb+{scheme}:' does not name a LanceDB; write lancedb+path:DIR#docs")
    if must_exist:
        check_exists(location, database="LanceDB")
    return LanceDBSink(location, collection, dimensions=dimensions, payload=payload, datatype=datatype, index=index)
