"""QdrantConnection: a collection of Qdrant, as sinks and indexes reach it."""

from __future__ import annotations

import math
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from qdrant_client import QdrantClient, models

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.sinks.client import Connection, Fault, check_timeout, is_address, is_url
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond_qdrant.failures import UnfinishedError, fault_of
from millpond_qdrant.folder import FolderLease, settle, use_write_ahead_log
from millpond_qdrant.local import is_folder, is_local, serialized, silence

Answer = TypeVar("Answer")


class QdrantConnection(Connection):
    """A client, its requests and their errors."""

    database = "Qdrant"
    row = "point"
    name_pattern = re.compile(r'(?!\.\.?\Z)[^<>:"/\\|?*\x00-\x1f]{1,255}')
    name_rule = '1 to 255 characters without < > : " / \\ | ? *'
    # The server takes requests of 32 MB by default; a float costs it up to 20 bytes of JSON.
    max_rows = 256
    max_bytes = 16 << 20
    float_bytes = 20

    client: QdrantClient

    def __init__(
        self,
        location: str | os.PathLike[str] | QdrantClient,
        collection: str,
        *,
        kind: str = "sink",
        timeout: float = 60,
        prefer_grpc: bool = False,
        grpc_port: int = 6334,
    ) -> None:
        client = location if isinstance(location, QdrantClient) else None
        path = None if isinstance(location, QdrantClient) else location
        super().__init__(path, collection, client=client, kind=kind)
        seconds = check_timeout(timeout)
        silence()
        self.lease: FolderLease | None = None  # of a folder that this object opened
        self._log: sqlite3.Connection | None = None  # of a folder, once it is prepared
        self.info: models.CollectionInfo | None = None
        if client is None:
            opened = _connect(self.where, seconds, prefer_grpc, grpc_port)
            self.lease = opened if isinstance(opened, FolderLease) else None
            self.client = opened.client if isinstance(opened, FolderLease) else opened
        # Local mode computes in this thread, and nobody has to be waited for.
        self.timeout = None if self.local else seconds

    @property
    def local(self) -> bool:
        """Whether the database is kept in this process: in memory, or in a folder."""
        return is_local(self.client)

    @property
    def embedded(self) -> bool:
        """Whether the database is a folder that this process writes."""
        return is_folder(self.client)

    def exists(self) -> bool:
        """Whether the collection exists."""
        return self.client.collection_exists(self.collection)

    def names(self) -> list[str]:
        """Names of the collections."""
        return [each.name for each in self.client.get_collections().collections]

    def read_manifest(self) -> object:
        """The manifest's JSON as stored; what else Qdrant says of the collection is in :attr:`info` then."""
        self.info = self.client.get_collection(self.collection)
        return (self.info.config.metadata or {}).get(MANIFEST_KEY)

    def count(self, condition: models.Filter | None = None) -> int:
        """How many points a condition matches."""
        return self.client.count(self.collection, count_filter=condition, exact=True).count

    def upsert(self, points: Any) -> None:
        """Store points, and wait for it."""
        self.check_folder()
        self.finish(self.client.upsert(self.collection, points=points, wait=True))

    def delete(self, which: models.Filter | list[Any]) -> None:
        """Delete the points with these ids, or those that a condition matches."""
        self.check_folder()
        selector = which if isinstance(which, models.Filter) else models.PointIdsList(points=which)
        self.finish(self.client.delete(self.collection, points_selector=selector, wait=True))

    def finish(self, result: models.UpdateResult) -> None:
        """Raise unless a change that was to be waited for is done."""
        if result.status is not models.UpdateStatus.COMPLETED:
            raise UnfinishedError(result.status)

    def open_log(self) -> None:
        """Let the commits of a folder go to a write-ahead log."""
        if self.lease is not None:
            self._log = self.request(
                "opening the write-ahead log", lambda: use_write_ahead_log(self.client, self.collection)
            )

    def flush(self) -> None:
        """Make acknowledged changes durable, once after the requests of a write or delete."""
        if (log := self._log) is not None:
            self.request("a checkpoint", lambda: settle(log))

    def check_folder(self) -> None:
        """Raise if a change of the folder failed, through this object or another."""
        if self.lease is not None and self.lease.failure is not None:
            raise SinkError(
                f"{self.database} at {self.where} takes no more writes, since one failed ({self.lease.failure}); "
                "close every sink and index of the folder, open it again and verify"
            )

    def fault(self, error: Exception, request: str) -> Fault | None:
        """What an error of the client means."""
        return fault_of(error, request)

    def release(self) -> None:
        """Close the client, or give the folder up."""
        if self.lease is not None:
            self.lease.close()
        else:
            with serialized(self.client):
                self.client.close()

    def request(self, words: str, call: Callable[[], Answer], *, limited: bool = True) -> Answer:
        """As the base; one thread at a time for local mode, and a folder remembers that a change failed."""

        def noted() -> Answer:
            try:
                return call()
            except (sqlite3.Error, OSError) as error:
                if self.lease is not None:
                    self.lease.fail(error)
                raise

        with serialized(self.client):
            return super().request(words, noted, limited=limited)


_MEMORY = ":memory:"
_SCHEMES = ("http://", "https://")
_KEY = re.compile(r"[!-~]+( +[!-~]+)*")
# Qdrant closes a connection that is idle for 5 s; one that is used at that moment would fail.
_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=3.0)


def _connect(location: str, timeout: float, prefer_grpc: bool, grpc_port: int) -> QdrantClient | FolderLease:
    """A client of a server or of memory, or the use of a folder."""
    if location == _MEMORY:
        return QdrantClient(_MEMORY)
    if is_url(location, _SCHEMES):
        return _connect_server(location, timeout, prefer_grpc, grpc_port)
    if "://" in location or "\0" in location or location.startswith("~") or not location:
        raise InvalidRequestError(
            f"location={location!r} is no place for Qdrant; pass ':memory:', an http(s) URL, a folder or a QdrantClient"
        )
    if is_address(location):
        raise InvalidRequestError(
            "the location looks like the address of a server; write http://host:6333, or './NAME' for a folder"
        )
    if Path(location).exists() and not Path(location).is_dir():
        raise InvalidRequestError(f"location={location!r} is a file; Qdrant keeps its data in a folder")
    return _open_folder(location)


def _connect_server(url: str, timeout: float, prefer_grpc: bool, grpc_port: int) -> QdrantClient:
    if "@" in url.split("/")[2]:
        raise InvalidRequestError("the URL holds credentials; leave them out and set QDRANT_API_KEY")
    key = os.environ.get("QDRANT_API_KEY") or None
    if key is not None and not _KEY.fullmatch(key):  # else the error of the header would show it
        raise InvalidRequestError(
            "QDRANT_API_KEY holds a character that no key has (a line end, a space around it, a letter beyond ASCII); "
            "set it again"
        )
    try:
        if not urlsplit(url).hostname:
            raise ValueError("it names no host")
        return QdrantClient(
            url=url,
            api_key=key,
            timeout=math.ceil(timeout),
            check_compatibility=False,
            prefer_grpc=prefer_grpc,
            grpc_port=grpc_port,
            grpc_options={"grpc.enable_retries": 0},
            limits=_LIMITS,
        )
    except ValueError as error:
        raise InvalidRequestError(
            f"location={url!r} cannot be used ({error}); write http://host:6333, and a proxy that speaks HTTP"
        ) from error


def _open_folder(folder: str) -> FolderLease:
    try:
        return FolderLease(folder)
    except RuntimeError as error:
        raise SinkError(
            f"the folder {folder!r} is in use by another process or client; close that one, or run a Qdrant server, "
            "which any number of processes may use, and pass its URL"
        ) from error
    except OSError as error:
        raise SinkError(f"the folder {folder!r} cannot be opened or made ({error.strerror}); choose another") from error
    except (ValueError, LookupError, TypeError, AttributeError, sqlite3.Error) as error:
        # qdrant-client does not validate the files: damage or a foreign file raises any of these.
        raise SinkError(
            f"the folder {folder!r} holds no database that this qdrant-client can read "
            f"({type(error).__name__}: {error}); restore it, or choose another folder"
        ) from error
