"""The entry point ``pgvector`` of ``millpond.sinks``: opens the sink of a URL ``pgvector+postgresql://HOST/DB#TABLE``."""

from collections.abc import Sequence

from millpond.errors import InvalidRequestError
from millpond_pgvector.sink import PgVectorSink


def sink_from_url(
    scheme: str,
    location: str,
    collection: str,
    *,
    dimensions: Sequence[int] | None = None,
    payload: str = "plain",
    datatype: str = "float32",
    index: str | None = None,
    timeout: float = 60,
) -> PgVectorSink:
    """Open ``pgvector+postgresql://host/db#docs``."""
    if scheme not in ("postgresql", "postgres") or not location.startswith("//"):
        raise InvalidRequestError(
            f"'pgvector+{scheme}:' does not name a PostgreSQL; write pgvector+postgresql://host/db#docs"
        )
    place = f"{scheme}:{location}"
    return PgVectorSink(
        place, collection, dimensions=dimensions, payload=payload, datatype=datatype, index=index, timeout=timeout
    )
