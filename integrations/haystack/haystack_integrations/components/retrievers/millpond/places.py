"""Where a retriever searches: the folder of a late-interaction index, or the URL of a collection."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.compat.composed import ModelSource
from millpond.ingest import open_sink
from millpond.late_interaction import PlaidIndex

if TYPE_CHECKING:
    from millpond import Engine


class IndexSource(ModelSource):
    """The model of a retriever.

    Attributes:
        pooling: Replaces the checkpoint's pooling method, as it did when the collection was filled.
    """

    loading = (*ModelSource.loading, "pooling")

    pooling: str | None = None


def opened(place: str, engine: Engine) -> Any:
    """The index in a folder, or the sink of a URL; both must exist."""
    if "#" in place and "+" in place.partition(":")[0]:
        return open_sink(place, must_exist=True)
    return PlaidIndex.open(Path(place).expanduser(), engine)
