"""MilvusCollection: a collection of Milvus, reached as sinks and indexes reach it."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from pymilvus import MilvusClient

from millpond.ingest.collection_client import CollectionClient
from millpond.ingest.manifest import MANIFEST_KEY
from millpond_milvus.client import connect, describe_error


class MilvusCollection(CollectionClient):
    """A client, its requests and their errors; a subclass calls :meth:`_connect` when it is made."""

    database: ClassVar[str] = "Milvus"
    name_pattern = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
    name_rule = "letters, digits and underscores, no digit first"
    # The server takes requests of 64 MB; half of that leaves room for what protobuf adds.
    max_rows = 1000
    max_bytes = 32 << 20
    float_bytes = 4

    _client: MilvusClient
    _timeout: float

    def _connect(self, client: MilvusClient | None, timeout: float) -> None:
        """Open the location, unless there is a client."""
        self._timeout = timeout
        with self._request("the connection"):
            self._client = connect(self._where, timeout) if client is None else client

    def _exists(self) -> bool:
        return bool(self._client.has_collection(self._collection, timeout=self._timeout))

    def _read_manifest(self) -> object:
        description = self._client.describe_collection(self._collection, timeout=self._timeout)
        text = (description.get("properties") or {}).get(MANIFEST_KEY)
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            return text

    def _count(self) -> int:
        """How many rows the collection holds, counting every acknowledged write."""
        rows = self._client.query(
            self._collection,
            filter="",
            output_fields=["count(*)"],
            consistency_level="Strong",
            timeout=self._timeout,
        )
        return int(rows[0]["count(*)"])

    def _is_lite(self) -> bool:
        """Whether the database is Milvus Lite."""
        return str(self._client.get_server_version(timeout=self._timeout)).startswith("milvus_lite")

    def _load_collection(self) -> None:
        """Make an existing collection ready to be read."""
        with self._request("loading the collection"):
            self._client.load_collection(self._collection, timeout=self._timeout)

    def _describe_error(self, error: Exception, request: str) -> str | None:
        return describe_error(error, request)
