"""MilvusConnection: a collection of Milvus, as sinks and indexes reach it."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pymilvus import MilvusClient, MilvusException

from millpond.errors import InvalidRequestError, SinkError, SinkRejectedError
from millpond.ingest.sinks.client import REQUEST_THREAD, Connection, Fault, check_timeout, is_address, is_url
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond_milvus.faults import fault_of, is_starting, is_unloaded
from millpond_milvus.lite import LiteFile, file_of, lite_lock, open_file, own_connection
from millpond_milvus.versions import Need, check_version

Answer = TypeVar("Answer")

# A run, or whoever calls, repeats these.
_CHANGES = frozenset(["insert", "upsert", "delete"])
# The share of a request's time for which it is repeated, and seconds between its attempts.
_PATIENCE, _FIRST_WAIT, _LONGEST_WAIT = 0.9, 0.1, 2.0


class MilvusConnection(Connection):
    """A client, its requests and their errors."""

    database = "Milvus"
    name_pattern = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
    name_rule = "letters, digits and underscores, no digit first"
    # The server takes requests of 64 MB; half of that leaves room for what protobuf adds.
    max_rows, max_bytes = 1000, 32 << 20

    client: MilvusClient

    def __init__(
        self, uri: str | os.PathLike[str] | MilvusClient, collection: str, *, kind: str = "sink", timeout: float = 60
    ) -> None:
        passed = uri if isinstance(uri, MilvusClient) else None
        path = None if isinstance(uri, MilvusClient) else uri
        super().__init__(path, collection, client=passed, kind=kind, timeout=check_timeout(timeout))
        self.file: LiteFile | None = None  # of Milvus Lite
        self.version = ""  # of a server

    def open(self) -> None:
        """Open the location, unless there is a client, and ask a server for its version."""
        if self.owned:
            self.client, self.file = self.request("the connection", lambda: connect(self.where))
        if self.file is None:
            version = str(self.request("the version", lambda: self.call("get_server_version")))
            if version.startswith("milvus_lite"):
                self.file = file_of(self.client)
            else:
                self.version = version

    def check_needs(self, needs: Iterable[Need]) -> None:
        """Raise InvalidRequestError for the first feature that this server lacks; Milvus Lite has checks of its own."""
        if self.file is None:
            check_version(self.version, needs, server=f"{self.database} at {self.where}")

    @property
    def embedded(self) -> bool:
        """Whether the database is Milvus Lite."""
        return self.file is not None

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call the client, which repeats a call once when the server is unavailable: then it has a new connection.

        A call that changes no rows is made again while the server says that it is not ready yet.
        """
        call = partial(getattr(self.client, method), *args, retry_times=1, **options)
        return call() if method in _CHANGES else self._when_ready(call)

    def changing(self) -> AbstractContextManager[None]:
        """Around a call that changes the collection: of Milvus Lite none follows one that failed."""
        if self.file is None:
            return nullcontext()
        return self.file.change(self.collection, count=self.count, harmless=self._harmless)

    def seal(self) -> None:
        """Before a search: let Milvus Lite write to a file what it holds in memory, if that is much."""
        if self.file is not None:
            self.file.seal(self.collection)

    def creating(self) -> AbstractContextManager[object]:
        """Held while Milvus Lite creates or prepares a collection, which it takes from one thread only."""
        return nullcontext() if is_url(self.where, URL_SCHEMES) else lite_lock

    def exists(self) -> bool:
        """Whether the collection exists."""
        return bool(self.call("has_collection", self.collection))

    def names(self) -> list[str]:
        """Names of the collections."""
        return list(self.call("list_collections"))

    def read_manifest(self) -> object:
        """The manifest in the collection's properties."""
        description = self.call("describe_collection", self.collection)
        text = (description.get("properties") or {}).get(MANIFEST_KEY)
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            return text

    def count(self) -> int:
        """How many rows the collection holds, counting every acknowledged write."""
        rows = self.call("query", self.collection, filter="", output_fields=["count(*)"], consistency_level="Strong")
        return int(rows[0]["count(*)"])

    def load(self) -> None:
        """Make an existing collection ready to be read."""
        self.request("loading the collection", lambda: self.call("load_collection", self.collection))
        if (file := self.file) is not None:
            self.request("a count", lambda: file.verify(self.collection, self.count))

    def pages(self, expression: str, fields: list[str], *, size: int) -> Iterator[list[dict[str, Any]]]:
        """These fields of every row that an expression finds, a page at a time, in the order of the primary keys."""
        pages = self.call("query_iterator", self.collection, filter=expression, output_fields=fields, batch_size=size)
        try:
            while page := self._when_ready(pages.next):
                yield list(page)
        finally:
            pages.close()

    def fault(self, error: Exception, request: str) -> Fault | None:
        """What an error of pymilvus means."""
        return fault_of(error, request, uri=self.where, lite=self.embedded)

    def _when_ready(self, call: Callable[[], Answer]) -> Answer:
        """The result of a call, made again until the server is ready: after a start it loads collections first."""
        # Shortly before the time of the request is over, the error says more than that.
        end, wait = time.monotonic() + _PATIENCE * (self.timeout or 0), _FIRST_WAIT
        while True:
            try:
                with nullcontext() if self.file is None else self.file.reading():
                    return call()
            except MilvusException as error:
                if self.embedded or not is_starting(error) or time.monotonic() + wait > end:
                    raise
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
                if is_unloaded(error):
                    self._load(end - time.monotonic())

    def _load(self, seconds: float) -> None:
        """Ask a server to load the collection, and wait for it; it may fail, since the call behind it is made again."""
        with suppress(MilvusException):
            self.client.load_collection(self.collection, timeout=max(seconds, _FIRST_WAIT))

    def _harmless(self, error: Exception) -> bool:
        """Whether an error of Milvus Lite was raised before it wrote anything: it checks all rows first."""
        if isinstance(error, SinkError | InvalidRequestError):
            return True
        fault = self.fault(error, "a change")
        return fault is not None and issubclass(fault.kind, SinkRejectedError)


def _not_ours(record: logging.LogRecord) -> bool:
    return record.threadName != REQUEST_THREAD


# The client logs every error with its traceback, and then raises it; its iterators that Milvus Lite has no time stamps.
for name in (
    "pymilvus.decorators",
    "pymilvus.client.connection_manager",
    "pymilvus.client.iterator.query_iterator",
    "pymilvus.orm.iterator",
):
    logging.getLogger(name).addFilter(_not_ours)


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


# Milvus Lite does so too, in a thread of its own.
logging.getLogger("milvus_lite.adapter.grpc.servicer").addFilter(_without_traceback)


URL_SCHEMES = ("http://", "https://", "tcp://", "unix:")  # of a server


def connect(uri: str) -> tuple[MilvusClient, LiteFile | None]:
    """A client of a server, or of Milvus Lite over a file, and this file."""
    if is_url(uri, URL_SCHEMES):
        if "@" in uri.partition("//")[2].split("/")[0]:
            raise InvalidRequestError("the URL holds credentials; leave them out and set MILVUS_TOKEN")
        token = os.environ.get("MILVUS_TOKEN", "")
        try:
            return MilvusClient(uri, token=token, **own_connection()), None
        except ValueError as error:
            raise InvalidRequestError(
                f"uri={uri!r} is no URL of a Milvus ({error}); write http://host:19530"
            ) from error
    if is_address(uri) and "://" not in uri:
        raise InvalidRequestError(
            "the uri looks like the address of a server; write http://host:19530, or './NAME.db' for a file of Milvus "
            "Lite"
        )
    if "://" in uri or "\0" in uri or uri.startswith("~") or not uri.endswith(".db"):
        raise InvalidRequestError(
            f"uri={uri!r} is no place for Milvus; pass a *.db file, a server's URL or a MilvusClient"
        )
    if not Path(uri).absolute().parent.is_dir():
        raise InvalidRequestError(
            f"uri={uri!r}: there is no folder {str(Path(uri).absolute().parent)!r}; create it first"
        )
    return open_file(uri)
