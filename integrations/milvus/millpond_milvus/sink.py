"""MilvusSink: a collection of Milvus, with one vector field for each Matryoshka width."""

from __future__ import annotations

import os
from typing import Unpack

from pymilvus import MilvusClient

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.database import check_options
from millpond.ingest.sinks.fields import check_fields
from millpond_milvus.connection import MilvusConnection
from millpond_milvus.driver import MilvusDriver
from millpond_milvus.layout import RowLayout
from millpond_milvus.url import MilvusOptions


class MilvusSink(CollectionSink[str]):
    """Writes to one collection of Milvus, and searches it.

    The first write creates the collection: a vector field ``d{width}`` for every width, the metric COSINE (an exact
    index in Milvus Lite, AUTOINDEX on a server), and the model's fingerprint in its properties. A search is two
    requests; it returns at most 16,384 hits out of as many candidates. Milvus Lite cannot tell ``True`` from 1, or
    ``False`` from 0, in a filter. After a write to a file of Milvus Lite that failed, no sink and no index of this
    process writes to it until it is opened again.

    Args:
        uri: A ``*.db`` file (Milvus Lite, inside this process), a server's URL, or a ``MilvusClient`` (which
            :meth:`close` leaves open). A server's token comes from ``MILVUS_TOKEN``; the URL's path names the database.
        collection: Name of the collection: letters, digits and underscores.
        options: See :class:`~millpond_milvus.url.MilvusOptions`.

    Raises:
        InvalidRequestError: A location, name or option that is not valid, or one that Milvus Lite does not have.
        MissingExtraError: The uri is a file and milvus-lite is not installed, or a data type needs ml_dtypes.
        SinkError: The server does not answer, or another process has the file open.
    """

    def __init__(
        self, uri: str | os.PathLike[str] | MilvusClient, collection: str, **options: Unpack[MilvusOptions]
    ) -> None:
        check_options("MilvusSink", options, MilvusOptions.__annotations__)
        fields = check_fields(options.get("fields", "plain"))
        connection = MilvusConnection(uri, collection, timeout=options.get("timeout", 60))
        layout = RowLayout.of(fields, options)
        super().__init__(
            MilvusDriver(connection, layout),
            dimensions=options.get("dimensions"),
            fields=fields,
            hybrid=layout.hybrid,
        )
        connection.open()
        try:
            if connection.embedded:
                layout.options.check_lite()
        except InvalidRequestError:
            self.close()
            raise
