"""ChromaConnection: a collection of a folder or a server of Chroma."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import chromadb
import httpx
from chromadb.api import ClientAPI
from chromadb.errors import ChromaError, NotFoundError

from millpond.errors import (
    InvalidRequestError,
    SinkError,
    SinkRejectedError,
    SinkTooLargeError,
    SinkUnavailableError,
)
from millpond.ingest.sinks.client import Connection, Fault, check_timeout, is_address, is_url
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond.ingest.sinks.table import manifest_of

Answer = TypeVar("Answer")

WIDTH = f"{MANIFEST_KEY}.width"  # metadata of a collection that holds the vectors of another one's width
_PAGE = 500
_PASSING = re.compile(r"locked|busy|disk i/o|is full|too many|timed? ?out|could not connect", re.IGNORECASE)


class ChromaConnection(Connection):
    """A collection of a folder, a server, or a client that was passed in."""

    database = "Chroma"
    row = "record"
    name_pattern = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,500}[a-zA-Z0-9]")
    name_rule = "3 to 502 letters, digits, '.', '_' and '-', a letter or digit at both ends"
    float_bytes = 6  # base64

    def __init__(self, location: str | os.PathLike[str] | ClientAPI, collection: str, *, timeout: float) -> None:
        passed = location if isinstance(location, ClientAPI) else None
        super().__init__(None if isinstance(location, ClientAPI) else location, collection, client=passed)
        self.remote = (
            "fastapi" in passed.get_settings().chroma_api_impl
            if passed is not None
            else is_url(self.where, ("http://", "https://"))
        )
        seconds = check_timeout(timeout)
        self.timeout = seconds if self.remote else None

    @property
    def embedded(self) -> bool:
        """Whether Chroma runs in this process: then a request after one that failed may wait forever."""
        return not self.remote

    def request(self, words: str, call: Callable[[], Answer], *, limited: bool = True) -> Answer:
        """As every connection; after an error of the disk, open the folder anew.

        Args:
            words: The request in words.
            call: Calls the client.
            limited: Whether the timeout applies.

        Returns:
            What ``call`` returns.

        Raises:
            SinkError: As every connection.
        """
        try:
            return super().request(words, call, limited=limited)
        except SinkUnavailableError:
            if self.owned and self.embedded and self.client is not None:
                self.client.close()  # its pool may wait for the connection that failed, with Python's lock held
                self.client = chromadb.PersistentClient(self.where)
            raise

    def open(self) -> None:
        """Open the folder, or connect to the server."""
        if self.owned:
            connect = self._server() if self.remote else self._folder()
            self.client = self.request("the connection", connect)
        self.max_rows = min(self.max_rows, self.request("a look at its limits", self.client.get_max_batch_size))

    def _folder(self) -> Any:
        if not self.where or "://" in self.where or is_address(self.where):
            raise InvalidRequestError(
                "the location is neither a folder nor a URL; write './NAME' for a folder, 'http://HOST:8000', or pass "
                "a client of chromadb"
            )
        if os.path.isfile(self.where):
            raise InvalidRequestError(f"location={self.where!r} is a file; Chroma keeps its collections in a folder")
        return lambda: chromadb.PersistentClient(self.where)

    def _server(self) -> Any:
        parts = urlsplit(self.where)
        if not parts.hostname or parts.username or parts.path not in ("", "/") or parts.query:
            raise InvalidRequestError(
                "the URL has more than a host and a port; write 'http://HOST:8000'. A key comes from the environment, "
                "as CHROMA_CLIENT_AUTH_CREDENTIALS"
            )
        host, secure = parts.hostname, parts.scheme.lower() == "https"
        port = parts.port or (443 if secure else 8000)
        return lambda: chromadb.HttpClient(host, port, ssl=secure)

    def of(self, name: str) -> Any:
        """A collection as it is now; its embedding function is not needed."""
        return self.client.get_collection(name, embedding_function=None)

    def table(self) -> Any:
        """The collection as it is now."""
        return self.of(self.collection)

    def exists(self) -> bool:
        """Whether there is such a collection."""
        try:
            return self.table() is not None
        except NotFoundError:
            return False

    def names(self) -> Iterator[str]:
        """Names of the collections, without those that hold a width of another one."""
        start = 0
        while page := self.client.list_collections(limit=_PAGE, offset=start):
            yield from (each.name for each in page if WIDTH not in (each.metadata or {}))
            start += len(page)

    def read_manifest(self) -> object:
        """The manifest in the collection's metadata."""
        return manifest_of((self.table().metadata or {}).get(MANIFEST_KEY))

    def fault(self, error: Exception, request: str) -> Fault | None:
        """What an error of the client means."""
        text = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, httpx.HTTPError):
            return Fault(words=f"did not answer {request}: {text}", kind=SinkUnavailableError)
        if not isinstance(error, ChromaError | ValueError | TypeError):
            return None
        code = error.code() if isinstance(error, ChromaError) else 400
        kind: type[SinkError] = SinkError
        if code == 429 or _PASSING.search(text):
            kind = SinkUnavailableError
        elif code == 413:
            kind = SinkTooLargeError
        elif request.startswith("an upsert") and code == 400:
            kind = SinkRejectedError
        return Fault(words=f"refused {request}: {text}", kind=kind)
