"""CollectionClient: one collection of a database, as sinks and late-interaction indexes reach it."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ClassVar, Self

from millpond.errors import InvalidRequestError, MillpondError, SinkError, SinkUnavailableError
from millpond.ingest.sinks.location import is_address


class CollectionClient(ABC):
    """A collection's name, its database's location, closing, and the errors of requests.

    A subclass names the database, its limits and its client, and implements ``_exists``, ``_read_manifest`` and
    ``_describe_error``; it may also override ``_classify``, ``_retry_after`` and ``_release``.

    Args:
        location: Where the database is; not read if the caller passed a client.
        collection: Name of the collection.
        owned: Whether this object opens the client, so that :meth:`close` closes it; ``False`` if the caller passed it.

    Raises:
        InvalidRequestError: A name or location that is not valid.
    """

    database: ClassVar[str]  # as error messages name it
    row: ClassVar[str] = "row"  # the database's word for a row
    kind: ClassVar[str] = "sink"  # what this object is
    name_pattern: ClassVar[re.Pattern[str]]
    name_rule: ClassVar[str]  # the pattern in words, after "use"
    max_rows: ClassVar[int]  # of one request
    max_bytes: ClassVar[int]  # of one request
    float_bytes: ClassVar[int]  # bytes of one float in a request

    _client: Any  # set by the subclass

    def __init__(self, location: str | os.PathLike[str] | None, collection: str, *, owned: bool = True) -> None:
        if not isinstance(collection, str) or not self.name_pattern.fullmatch(collection):
            raise InvalidRequestError(f"collection={collection!r} is no name for {self.database}; use {self.name_rule}")
        self._collection = collection
        self._owned = owned
        self._where = self._check_location(location) if owned else "the client passed in"
        self._closed = False

    @property
    def collection(self) -> str:
        """The collection's name."""
        return self._collection

    @property
    def target(self) -> str:
        """The database and the collection, as a journal names them: the same from any folder and in any process."""
        remote = "://" in self._where or not self._owned or self._where.startswith(":")
        return f"{self.database} {self._where if remote else os.path.realpath(self._where)} {self._collection}"

    def close(self) -> None:
        """Close the client, unless it was passed in; from then on requests raise SinkError."""
        if self._owned and not self._closed:
            self._closed = True
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------- implemented by each database

    @abstractmethod
    def _exists(self) -> bool:
        """Whether the collection exists."""

    @abstractmethod
    def _read_manifest(self) -> object:
        """The manifest's JSON as stored, not validated; ``None`` if the collection has none."""

    @abstractmethod
    def _describe_error(self, error: Exception, request: str) -> str | None:
        """An error of the client as the end of "Database at location ..."; ``None`` for one that is not expected."""

    def _classify(self, error: Exception) -> type[SinkError]:
        """What kind of :class:`~millpond.errors.SinkError` an error of the client becomes: by default none to retry."""
        return SinkError

    def _retry_after(self, error: Exception) -> float | None:
        """Seconds that the database asks to wait, if an error of the client says so."""
        return None

    def _release(self) -> None:
        """Close the client that this object opened; by default nobody shares it."""
        self._client.close()

    # ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _request(self, request: str) -> Iterator[None]:
        """Turn an error of the client into a SinkError that names the database, its location and the request."""
        if self._closed:
            raise SinkError(
                f"{self.database} at {self._where} refused {request}: this {self.kind} is closed; open another one"
            )
        try:
            yield
        except MillpondError:
            raise
        except Exception as error:
            description = self._describe_error(error, request)
            if description is None:  # a client asserts what its server never answers, or reads keys that are not there
                description = f"answered {request} with something that its client cannot read ({error!r})"
            message = f"{self.database} at {self._where} {description}"
            kind = self._classify(error)
            if issubclass(kind, SinkUnavailableError):
                raise kind(message, retry_after=self._retry_after(error)) from error
            raise kind(message) from error

    def _check_location(self, location: object) -> str:
        path = os.fspath(location) if isinstance(location, str | os.PathLike) else None
        if not isinstance(path, str):
            raise InvalidRequestError(
                f"the location of {self.database} is of type {type(location).__name__}; pass a str, a path or a client"
            )
        path = os.path.expanduser(path)
        # A path object says itself that it is no address, and drops the "./" that says so in a str.
        return path if isinstance(location, str) or not is_address(path) else os.path.join(os.curdir, path)

    def _found(self) -> bool:
        with self._request("a look for the collection"):
            return self._exists()
