"""The entry point ``lancedb`` of ``millpond.sinks``: opens the sink of a URL ``lancedb+path:DIR#TABLE``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.client import check_exists
from millpond.ingest.sinks.database import database

if TYPE_CHECKING:
    from millpond_lancedb.sink import LanceDBSink


class LanceDBOptions(TypedDict, total=False):
    """The options of :class:`LanceDBSink`, which describes them."""

    dimensions: Sequence[int] | None
    fields: str | None
    datatype: str | None
    index: str | None


@database(
    options=LanceDBOptions.__annotations__,
    urls=("lancedb+path:vectors#docs",),
    datatypes=("float32", "float16"),
    packages=("lancedb",),
)
def sink_from_url(
    scheme: str, location: str, collection: str, *, must_exist: bool = False, **options: Unpack[LanceDBOptions]
) -> LanceDBSink:
    """Open ``lancedb+path:DIR#docs``; ``must_exist`` refuses a folder that is not there."""
    from millpond_lancedb.sink import LanceDBSink  # the client, which a look at the options does not need

    if scheme != "path" or not location:
        raise InvalidRequestError(f"'lancedb+{scheme}:' does not name a LanceDB; write lancedb+path:DIR#docs")
    if must_exist:
        check_exists(location, database="LanceDB", marker=".")
    return LanceDBSink(location, collection, **options)
