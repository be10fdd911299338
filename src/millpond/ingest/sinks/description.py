"""CollectionDescription: what a database stores of a collection, whoever made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from millpond.ingest.sinks.client import Connection
from millpond.ingest.sinks.driver import CollectionDriver
from millpond.ingest.sinks.manifest import CollectionManifest

if TYPE_CHECKING:
    from millpond.ingest.sinks.index_manifest import IndexManifest


@dataclass(frozen=True, kw_only=True)
class CollectionDescription:
    """A collection, as it is stored.

    Attributes:
        name: The collection's name.
        rows: How many rows it holds, or nearly.
        manifest: What millpond stored of its model and its form; ``None`` if millpond did not make it.
        datatype: The data type of its vectors; ``None`` if it is not known.
    """

    name: str
    rows: int
    manifest: CollectionManifest | IndexManifest | None = None
    datatype: str | None = None

    @property
    def kind(self) -> str:
        """What it holds: ``vectors``, ``token vectors``, or ``not made by millpond``."""
        if self.manifest is None:
            return "not made by millpond"
        return "vectors" if isinstance(self.manifest, CollectionManifest) else "token vectors"

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON holds it; what a collection of its kind does not have is left out."""
        content: dict[str, Any] = {"name": self.name, "kind": self.kind, "rows": self.rows}
        manifest = self.manifest
        if manifest is None:
            return content
        if isinstance(manifest, CollectionManifest):
            form = {
                "dimensions": list(manifest.dimensions),
                "datatype": self.datatype,
                "fields": manifest.fields,
                "chunked": manifest.chunked,
                "context": manifest.context,
                "run": manifest.run or None,  # the id of the run that wrote last
                "succession": None if manifest.succession is None else manifest.succession.to_dict(),
                "sparse": None if manifest.sparse is None else manifest.sparse.to_json(),
            }
            return {**content, **manifest.identity.to_json(), **form}
        stored = manifest.settings
        model = {} if stored.model is None else stored.model.to_json()
        form = {"dimensions": [stored.width], "codec": manifest.codec, "prefetch": manifest.prefetch}
        return {**content, **model, **form, "pool_factor": stored.pool_factor}


def describe(connection: Connection, driver: CollectionDriver[Any]) -> CollectionDescription:
    """What is stored of a collection.

    Args:
        connection: The collection.
        driver: The requests of a sink of it.

    Returns:
        Its manifest, if millpond made it, and its size.

    Raises:
        InvalidRequestError: There is no such collection.
        FingerprintMismatchError: It has a manifest that this version cannot read.
    """
    if not connection.found():
        raise connection.missing()
    name, data, datatype = connection.collection, connection.stored_manifest(), None
    manifest: CollectionManifest | IndexManifest | None = None
    if isinstance(data, Mapping) and "kind" in data:
        from millpond.ingest.sinks.index_manifest import IndexManifest

        manifest = IndexManifest.from_dict(data, collection=name)
    elif data is not None:
        manifest = CollectionManifest.from_dict(data, collection=name)
        datatype = connection.request("a look at its vectors", partial(driver.datatype_of, manifest))
    rows = connection.request("a count", driver.size)
    return CollectionDescription(name=name, rows=rows, manifest=manifest, datatype=datatype)
