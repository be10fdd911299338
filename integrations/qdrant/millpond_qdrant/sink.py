"""QdrantSink: a collection of Qdrant, with one named vector for each Matryoshka width."""

from __future__ import annotations

import os
from typing import Unpack

from qdrant_client import QdrantClient, models

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.database import check_options
from millpond.ingest.sinks.fields import check_fields
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond_qdrant.connection import QdrantConnection
from millpond_qdrant.driver import QdrantDriver
from millpond_qdrant.url import QdrantOptions
from millpond_qdrant.vector_storage import VectorStorage


class QdrantSink(CollectionSink[models.Filter]):
    """Writes to one collection of Qdrant, and searches it.

    The first write creates the collection: a vector ``d{width}`` for every width, cosine distance, and the model's
    fingerprint in the collection's metadata (Qdrant 1.16 or newer). A search is one request. It finds the points that a
    framework wrote with one of the vectors, too; a sink that has searched a server may miss new ones for up to a
    minute. The sinks of a process share a folder, and any thread may use them.

    Args:
        location: ``":memory:"``, an http(s) URL, a folder for a database inside this process, or a ``QdrantClient``
            (which :meth:`close` leaves open). A URL's key comes from ``QDRANT_API_KEY``. A folder whose name looks like
            the address of a server begins with ``./``.
        collection: Name of the collection.
        options: See :class:`~millpond_qdrant.url.QdrantOptions`.

    Raises:
        InvalidRequestError: A location, name or option that is not valid.
        SinkError: The folder is in use by another process, damaged, or cannot be created.
    """

    def __init__(
        self,
        location: str | os.PathLike[str] | QdrantClient,
        collection: str,
        **options: Unpack[QdrantOptions],
    ) -> None:
        check_options("QdrantSink", options, QdrantOptions.__annotations__)
        fields = options.get("fields")
        layout = check_fields(fields or "plain")
        storage = VectorStorage.of(layout, options)
        connection = QdrantConnection(
            location,
            collection,
            timeout=options.get("timeout", 60),
            prefer_grpc=options.get("prefer_grpc", False),
            grpc_port=options.get("grpc_port", 6334),
        )
        driver = QdrantDriver(connection, storage, options.get("indexes"), layout)
        super().__init__(
            driver, dimensions=options.get("dimensions"), fields=fields, hybrid=options.get("hybrid", False)
        )
        self.options = {**options}
        if (batch := options.get("batch")) is not None:
            if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
                raise InvalidRequestError(f"batch={batch!r} must be an int from 1: the most points of one request")
            connection.max_rows = batch

    def swap_alias(self, alias: str, *, delete_former: bool = False) -> str | None:
        """Let an alias name this collection, in one step: readers by that name see the former one, or this.

        Sinks that read by the alias follow, and check the model again within a minute.

        Args:
            alias: The name. Sinks take it as they take a collection's.
            delete_former: Delete the collection that it named.

        Returns:
            The collection that it named.

        Raises:
            InvalidRequestError: No such collection; a name that is not valid, or a collection's; or a former collection
                that is not millpond's or has more aliases, and is to be deleted.
            FingerprintMismatchError: millpond did not create the collection.
            SinkError: The database does not answer, or refuses.
        """
        self._connection.check_name("alias", alias)
        self.open()
        return self._connection.request("an alias swap", lambda: self._swap(alias, delete_former=delete_former))

    def _swap(self, alias: str, *, delete_former: bool) -> str | None:
        client = self._connection.client
        own = aliased(client, self.collection)
        if own is not None:
            raise InvalidRequestError(
                f"{self.collection!r} is an alias itself, of {own!r}; open the sink of that collection"
            )
        former = aliased(client, alias)
        if former is None and client.collection_exists(alias):
            raise InvalidRequestError(
                f"alias={alias!r} is the name of a collection, which no alias can take; choose another, or delete "
                "that collection first"
            )
        doomed = former if delete_former and former != self.collection else None
        if doomed is not None:
            self._check_deletable(doomed, alias)
        created = models.CreateAlias(collection_name=self.collection, alias_name=alias)
        deleted = models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=alias))
        changes = [] if former is None else [deleted]
        client.update_collection_aliases([*changes, models.CreateAliasOperation(create_alias=created)])
        if doomed is not None:
            client.delete_collection(doomed)
        return former

    def _check_deletable(self, collection: str, alias: str) -> None:
        """Raise InvalidRequestError for a collection that is somebody else's, or that more aliases name."""
        keep = "pass delete_former=False to keep it"
        metadata = self.client.get_collection(collection).config.metadata or {}
        if MANIFEST_KEY not in metadata:
            raise InvalidRequestError(f"alias={alias!r} names {collection!r}, which was not made by millpond; {keep}")
        names = {known.alias_name for known in self.client.get_collection_aliases(collection).aliases}
        if others := sorted(names - {alias}):
            raise InvalidRequestError(f"collection {collection!r} has the aliases {others} too; {keep}")


def aliased(client: QdrantClient, alias: str) -> str | None:
    """The collection that an alias names; ``None`` if there is no such alias."""
    names = {known.alias_name: known.collection_name for known in client.get_aliases().aliases}
    return names.get(alias)
