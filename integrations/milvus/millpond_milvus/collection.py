"""MilvusCollection: a collection of Milvus, reached as sinks and indexes reach it."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

from pymilvus import MilvusClient

from millpond.errors import InvalidRequestError, SinkError, SinkRejectedError
from millpond.ingest.sinks.client import CollectionClient
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond_milvus.client import connect
from millpond_milvus.deadline import repeat_once, within
from millpond_milvus.faults import Fault, find_fault, retry_after
from millpond_milvus.lite import LiteFile, file_of

Answer = TypeVar("Answer")

# What a query hands out at the most: rows and the number of those before them.
WINDOW = 16_384


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
    _file: LiteFile | None = None  # of Milvus Lite

    def _connect(self, client: MilvusClient | None, timeout: float) -> None:
        """Open the location, unless there is a client."""
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise InvalidRequestError(f"timeout={timeout!r} must be a number of seconds above 0")
        self._timeout = float(timeout)
        self._faults = threading.local()
        if client is None:
            with self._request("the connection"):
                self._client, self._file = connect(self._where, self._timeout)
        else:
            self._client = client
        repeat_once(self._client)
        if self._file is None:
            with self._request("the version"):
                if str(self._call("get_server_version")).startswith("milvus_lite"):
                    self._file = file_of(self._client)

    @property
    def _lite(self) -> bool:
        """Whether the database is Milvus Lite."""
        return self._file is not None

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call the client, for at most ``timeout`` seconds over all that it sends and repeats."""
        call = getattr(self._client, method)
        return self._within(lambda: call(*args, timeout=self._timeout, **options))

    def _within(self, call: Callable[[], Answer]) -> Answer:
        return within(self._timeout, call)

    def _changes(self) -> AbstractContextManager[None]:
        """Around a request that changes the collection: of Milvus Lite none follows one that failed."""
        if self._file is None:
            return nullcontext()
        return self._file.change(self._collection, count=self._count, harmless=self._harmless)

    def _harmless(self, error: Exception) -> bool:
        """Whether an error of Milvus Lite was raised before it wrote anything: it checks all rows first."""
        return isinstance(error, SinkError | InvalidRequestError) or issubclass(
            self._classify(error), SinkRejectedError
        )

    def _exists(self) -> bool:
        return bool(self._call("has_collection", self._collection))

    def _read_manifest(self) -> object:
        description = self._call("describe_collection", self._collection)
        text = (description.get("properties") or {}).get(MANIFEST_KEY)
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            return text

    def _count(self) -> int:
        """How many rows the collection holds, counting every acknowledged write."""
        rows = self._call("query", self._collection, filter="", output_fields=["count(*)"], consistency_level="Strong")
        return int(rows[0]["count(*)"])

    def _load_collection(self) -> None:
        """Make an existing collection ready to be read."""
        with self._request("loading the collection"):
            self._call("load_collection", self._collection)
        if self._file is not None:
            with self._request("a count"):
                self._file.verify(self._collection, self._count)

    def _pages_of(self, expression: str, fields: list[str], *, size: int) -> Iterator[list[dict[str, Any]]]:
        """These fields of every row that an expression finds, a page at a time, in the order of the primary keys."""
        pages = self._call("query_iterator", self._collection, filter=expression, output_fields=fields, batch_size=size)
        try:
            while page := self._within(pages.next):
                yield list(page)
        finally:
            pages.close()

    def _describe_error(self, error: Exception, request: str) -> str | None:
        fault = find_fault(error, request, uri=self._where, timeout=self._timeout, lite=self._lite)
        self._faults.last = (error, fault)  # so that the server is looked at once
        return None if fault is None else fault.words

    def _classify(self, error: Exception) -> type[SinkError]:
        known, fault = getattr(self._faults, "last", (None, None))
        if known is not error:
            fault = find_fault(error, "a request", uri=self._where, timeout=self._timeout, lite=self._lite)
        return fault.kind if isinstance(fault, Fault) else SinkError

    def _retry_after(self, error: Exception) -> float | None:
        return retry_after(error)
