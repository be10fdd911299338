"""The entry point ``chroma`` of ``millpond.sinks``: opens the sink of a URL ``chroma+SCHEME:LOCATION#COLLECTION``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.client import check_exists
from millpond.ingest.sinks.database import database

if TYPE_CHECKING:
    from millpond_chroma.sink import ChromaSink


class ChromaOptions(TypedDict, total=False):
    """The options of :class:`ChromaSink`, which describes them."""

    dimensions: Sequence[int] | None
    fields: str | None
    timeout: float


@database(
    options=ChromaOptions.__annotations__,
    urls=("chroma+path:vectors#docs", "chroma+http://localhost:8000#docs"),
    variables=("CHROMA_",),
    datatypes=("float32",),
    packages=("chromadb",),
)
def sink_from_url(
    scheme: str, location: str, collection: str, *, must_exist: bool = False, **options: Unpack[ChromaOptions]
) -> ChromaSink:
    """Open ``chroma+path:DIR#docs`` or ``chroma+http://host:8000#docs``; ``must_exist`` refuses an empty folder."""
    from millpond_chroma.sink import ChromaSink  # the client, which a look at the options does not need

    match scheme:
        case "path" if location:
            if must_exist:
                check_exists(location, database="Chroma", marker="chroma.sqlite3")
            return ChromaSink(location, collection, **options)
        case "http" | "https" if location.startswith("//"):
            return ChromaSink(f"{scheme}:{location}", collection, **options)
    raise InvalidRequestError(
        f"'chroma+{scheme}:' does not name a Chroma; write chroma+path:DIR#docs or chroma+http://host:8000#docs"
    )
