"""The entry point ``pgvector`` of ``millpond.sinks``: opens the sink of a URL ``pgvector+postgresql://HOST/DB#TABLE``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.database import database

if TYPE_CHECKING:
    from millpond_pgvector.sink import PgVectorSink


class PgVectorOptions(TypedDict, total=False):
    """The options of :class:`PgVectorSink`, which describes them."""

    dimensions: Sequence[int] | None
    fields: str | None
    datatype: str | None
    index: str | None
    timeout: float


@database(
    options=PgVectorOptions.__annotations__,
    urls=("pgvector+postgresql://localhost/db#docs",),
    variables=("PGUSER", "PGPASSWORD", "PGPASSFILE"),
    datatypes=("float32", "float16"),
    coarse_datatypes=("bit",),
    packages=("psycopg",),
)
def sink_from_url(
    scheme: str, location: str, collection: str, *, must_exist: bool = False, **options: Unpack[PgVectorOptions]
) -> PgVectorSink:
    """Open ``pgvector+postgresql://host/db#docs``; ``must_exist`` changes nothing, since nobody creates it."""
    from millpond_pgvector.sink import PgVectorSink  # the client, which a look at the options does not need

    if scheme not in ("postgresql", "postgres") or not location.startswith("//"):
        raise InvalidRequestError(
            f"'pgvector+{scheme}:' does not name a PostgreSQL; write pgvector+postgresql://host/db#docs"
        )
    return PgVectorSink(f"{scheme}:{location}", collection, **options)
