"""QdrantCollection: a collection of Qdrant, reached as sinks and indexes reach it."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from qdrant_client import QdrantClient, models

from millpond.errors import SinkError
from millpond.ingest.sinks.client import CollectionClient
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond_qdrant.client import connect
from millpond_qdrant.failures import UnfinishedError, classify_error, describe_error, retry_after
from millpond_qdrant.folder import FolderLease, settle, use_write_ahead_log
from millpond_qdrant.local import serialized, silence


class QdrantCollection(CollectionClient):
    """A client, its requests and their errors; a subclass calls :meth:`_connect` when it is made."""

    database: ClassVar[str] = "Qdrant"
    row: ClassVar[str] = "point"
    name_pattern = re.compile(r'(?!\.\.?\Z)[^<>:"/\\|?*\x00-\x1f]{1,255}')
    name_rule = '1 to 255 characters without < > : " / \\ | ? *'
    # The server takes requests of 32 MB by default; a float costs it up to 20 bytes of JSON.
    max_rows = 256
    max_bytes = 16 << 20
    float_bytes = 20

    _client: QdrantClient
    _lease: FolderLease | None = None  # of a folder that this object opened
    _log: sqlite3.Connection | None = None  # of a folder, once it is prepared

    def _connect(
        self, client: QdrantClient | None, timeout: float, *, prefer_grpc: bool = False, grpc_port: int = 6334
    ) -> None:
        """Open the location, unless there is a client."""
        silence()
        opened = (
            connect(self._where, timeout, prefer_grpc=prefer_grpc, grpc_port=grpc_port) if client is None else client
        )
        self._lease = opened if isinstance(opened, FolderLease) else None
        self._client = opened.client if isinstance(opened, FolderLease) else opened

    def _exists(self) -> bool:
        return self._client.collection_exists(self._collection)

    def _read_manifest(self) -> object:
        metadata = self._client.get_collection(self._collection).config.metadata
        return (metadata or {}).get(MANIFEST_KEY)

    def _open_log(self) -> None:
        """Let the commits of a folder go to a write-ahead log."""
        if self._lease is not None:
            with self._request("opening the write-ahead log"):
                self._log = use_write_ahead_log(self._client, self._collection)

    def _flush(self) -> None:
        """Make acknowledged changes durable, once after the requests of a write or delete."""
        if self._log is not None:
            with self._request("a checkpoint"):
                settle(self._log)

    def _finished(self, result: models.UpdateResult) -> None:
        """Raise unless a change that was to be waited for is done."""
        if result.status is not models.UpdateStatus.COMPLETED:
            raise UnfinishedError(result.status)

    def _describe_error(self, error: Exception, request: str) -> str | None:
        return describe_error(error, request)

    def _classify(self, error: Exception) -> type[SinkError]:
        return classify_error(error)

    def _retry_after(self, error: Exception) -> float | None:
        return retry_after(error)

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.close()
        else:
            with serialized(self._client):
                self._client.close()

    @contextmanager
    def _request(self, request: str) -> Iterator[None]:
        with serialized(self._client), super()._request(request):
            try:
                yield
            except (sqlite3.Error, OSError) as error:
                if self._lease is not None:
                    self._lease.fail(error)
                raise

    def _check_folder(self) -> None:
        """Raise if a change of the folder failed, through this object or another."""
        if self._lease is not None and self._lease.failure is not None:
            raise SinkError(
                f"{self.database} at {self._where} takes no more writes, since one failed ({self._lease.failure}); "
                "close every sink and index of the folder, open it again and verify"
            )
