"""Connection: one collection of a database, as sinks and late-interaction indexes reach it."""

from __future__ import annotations

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from millpond.errors import InvalidRequestError, MillpondError, SinkError, SinkUnavailableError
from millpond.support.similar import list_names

Answer = TypeVar("Answer")

_NOBODY = re.compile(r"connection refused|actively refused|\[Errno 111\]", re.IGNORECASE)  # by the system, of a port
REQUEST_THREAD = "millpond-request"
"""The name of the threads in which :func:`within` makes calls."""


class DeadlineError(Exception):
    """A call took longer than it may."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What an error of a client means.

    Attributes:
        words: The end of "Database at location ...".
        kind: What it becomes.
        retry_after: Seconds that the database asks to wait, if it says so.
    """

    words: str
    kind: type[SinkError] = SinkError
    retry_after: float | None = None


class Connection(ABC):
    """A collection's name, its database's location, its client, and the errors of requests.

    A subclass names the database and its limits, sets :attr:`client`, and implements :meth:`exists` and
    :meth:`read_manifest`. It may also override :meth:`fault`, :meth:`release`, :meth:`hang_up` and :meth:`creating`.

    Args:
        location: Where the database is; not read if the caller passed a client.
        collection: Name of the collection.
        client: The caller's client, which :meth:`close` leaves open; ``None`` if this object opens one.
        kind: What reaches the collection, as error messages name it.
        timeout: Seconds that a request may take, whatever the server does; ``None`` for no limit.

    Raises:
        InvalidRequestError: A name or location that is not valid.
    """

    database: ClassVar[str]  # as error messages name it
    row: ClassVar[str] = "row"  # the database's word for a row
    name_pattern: ClassVar[re.Pattern[str]] = re.compile(r"\S+")
    name_rule: ClassVar[str] = "a name without spaces"  # the pattern in words, after "use"
    max_rows: int = 1000  # of one request
    max_bytes: ClassVar[int] = 16 << 20  # of one request
    float_bytes: ClassVar[int] = 4  # bytes of one float in a request

    client: Any
    """The database's own client."""

    def __init__(
        self,
        location: str | os.PathLike[str] | None,
        collection: str,
        *,
        client: Any = None,
        kind: str = "sink",
        timeout: float | None = None,
    ) -> None:
        self.check_name("collection", collection)
        self.collection = collection
        self.kind = kind
        self.owned = client is None
        self.where = self._checked(location) if self.owned else "the client passed in"
        self.timeout = timeout
        self.client = client
        self.closed = False

    @classmethod
    def check_name(cls, argument: str, name: object) -> None:
        """Raise InvalidRequestError for a name that no collection of the database can have.

        Args:
            argument: The name of the argument, for the error message.
            name: The name to check.

        Raises:
            InvalidRequestError: The name does not match :attr:`name_pattern`.
        """
        if not isinstance(name, str) or not cls.name_pattern.fullmatch(name):
            raise InvalidRequestError(f"{argument}={name!r} is no name for {cls.database}; use {cls.name_rule}")

    @property
    def target(self) -> str:
        """The database and the collection, as a journal names them: the same from any folder and in any process."""
        remote = "://" in self.where or not self.owned or self.where.startswith(":")
        return f"{self.database} {self.where if remote else os.path.realpath(self.where)} {self.collection}"

    def is_same(self, other: Connection) -> bool:
        """Whether another connection reaches the same collection.

        Args:
            other: The other connection.

        Returns:
            ``False`` for two databases in memory, and for clients that were passed in and are not the same object.
        """
        lasting = self.owned and other.owned and not self.where.startswith(":")
        return self.target == other.target and (lasting or self.client is other.client)

    @property
    def place(self) -> Any:
        """What a sink of another collection of the same database is opened with."""
        return self.client if not self.owned or self.where.startswith(":") else self.where

    @property
    def embedded(self) -> bool:
        """Whether the database runs inside this process."""
        return False

    def close(self) -> None:
        """Close the client, unless it was passed in; from then on requests raise SinkError."""
        if self.owned and not self.closed:
            self.closed = True
            self.release()

    @abstractmethod
    def exists(self) -> bool:
        """Whether the collection exists."""

    @abstractmethod
    def read_manifest(self) -> object:
        """The manifest's JSON as stored, not validated; ``None`` if the collection has none."""

    def names(self) -> Iterable[str]:
        """Names of the collections of the database, whoever made them; by default none is known.

        Returns:
            Names in any order.
        """
        return ()

    def fault(self, error: Exception, request: str) -> Fault | None:
        """What an error of the client means; ``None`` for one that no client raises on purpose.

        Args:
            error: The error that the client raised.
            request: The request in words.

        Returns:
            The meaning, or ``None``, which is the default.
        """
        return None

    def release(self) -> None:
        """Close the client that this object opened; by default nobody shares it."""
        self.client.close()

    def hang_up(self) -> None:
        """End what a request waits for, whose time is over."""
        return

    def creating(self) -> AbstractContextManager[object]:
        """Held while a collection is created or made ready.

        Returns:
            A context manager; by default one that does nothing.
        """
        return nullcontext()

    def request(self, words: str, call: Callable[[], Answer], *, limited: bool = True) -> Answer:
        """The result of a call of the client, whose error becomes a SinkError that names database and request.

        Args:
            words: The request in words, as "an upsert of 3 rows".
            call: Calls the client.
            limited: Whether the timeout applies.

        Returns:
            What ``call`` returns.

        Raises:
            SinkUnavailableError: The database did not answer in time.
            SinkError: The connection is closed, or the call failed; :meth:`fault` may choose a subclass of it.
        """
        if self.closed:
            raise SinkError(
                f"{self.database} at {self.where} did not get {words}: this {self.kind} is closed; open another one"
            )
        seconds = self.timeout if limited else None
        try:
            return call() if seconds is None else within(seconds, call, self.hang_up)
        except MillpondError:
            raise
        except DeadlineError as error:
            late = f"did not answer {words} within {seconds:g} s; pass a larger timeout if the server is only slow"
            raise SinkUnavailableError(f"{self.database} at {self.where} {late}") from error
        except Exception as error:
            fault = self.fault(error, words)
            if fault is None:  # a client asserts what its server never answers, or reads keys that are not there
                fault = Fault(words=f"answered {words} with something that its client cannot read ({error!r})")
            message = f"{self.database} at {self.where} {fault.words}"
            if issubclass(fault.kind, SinkUnavailableError) and _NOBODY.search(fault.words):
                message = (
                    f"nothing listens at {self.where}, so {self.database} did not answer {words}; start it, or correct "
                    "host and port"
                )
            if issubclass(fault.kind, SinkUnavailableError):
                raise fault.kind(message, retry_after=fault.retry_after) from error
            raise fault.kind(message) from error

    def found(self) -> bool:
        """Whether the collection exists, as a request."""
        return self.request("a look for the collection", self.exists)

    def listed(self) -> list[str]:
        """Names of the collections of the database, as a request, in alphabetical order."""
        return self.request("a look at its collections", lambda: sorted(self.names()))

    def missing(self) -> InvalidRequestError:
        """The error of a collection that does not exist: it names those that do, similar names first."""
        known = ""
        with suppress(SinkError):  # who may read a collection need not be allowed to list all
            known = list_names(self.collection, self.listed())
        ways = f"it has {known}; correct the name, or ingest into it first" if known else "ingest into it first"
        return InvalidRequestError(f"there is no collection {self.collection!r} at {self.where}; {ways}")

    def stored_manifest(self) -> object:
        """What :meth:`read_manifest` returns, as a request.

        Returns:
            The manifest's JSON, not validated; ``None`` if the collection has none.
        """
        return self.request("a look at the collection", self.read_manifest)

    def create(self, create: Callable[[], None]) -> None:
        """Create the collection, unless another process was faster: whoever calls checks what is there.

        Args:
            create: Creates the collection.

        Raises:
            SinkError: It failed, and the collection does not exist.
        """
        try:
            self.request("creating the collection", create)
        except SinkError:
            if not self.found():
                raise

    def _checked(self, location: object) -> str:
        if not isinstance(location, str | os.PathLike) or isinstance(os.fspath(location), bytes):
            raise InvalidRequestError(
                f"the location of {self.database} is of type {type(location).__name__}; pass a str, a path or a client"
            )
        return os.path.expanduser(os.fspath(location))


def check_timeout(timeout: object) -> float:
    """The seconds of a sink's option ``timeout``; raises InvalidRequestError for anything else."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= threading.TIMEOUT_MAX:
        raise InvalidRequestError(f"timeout={timeout!r} must be a number of seconds above 0")
    return float(timeout)


def within(seconds: float, call: Callable[[], Answer], hang_up: Callable[[], object] = lambda: None) -> Answer:
    """The result of a call, whatever its server does: also if it sends a byte now and then.

    The call runs in a thread of its own, which is left behind when the time is over.
    """
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name=REQUEST_THREAD, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # the call's own error
            raise
        hang_up()
        raise DeadlineError(f"not done after {seconds:g} s") from None


# host:6333, which would otherwise become a folder or file of that name; ./host:6333 is one.
_HOST_AND_PORT = re.compile(
    r"(?!\.{0,2}[/\\]|~|[A-Za-z]:[/\\])[^/\\]+:\d{1,5}(?:[/\\].*)?|localhost(?:[/\\].*)?", re.IGNORECASE
)


def is_url(location: str, schemes: tuple[str, ...]) -> bool:
    """Whether a location begins with one of these lower-case schemes, in any case."""
    return location.lower().startswith(schemes)


def is_address(location: str) -> bool:
    """Whether a location without a scheme is a host with a port, or ``localhost``: somebody forgot the scheme."""
    return _HOST_AND_PORT.fullmatch(location) is not None


def check_exists(path: str, *, database: str, marker: str = "") -> None:
    """Raise InvalidRequestError unless a database is at a path, so that a mistyped path does not become a new one."""
    place = os.path.expanduser(path)
    if not os.path.exists(os.path.join(place, marker) if marker else place):
        raise InvalidRequestError(
            f"there is no database of {database} at {path!r}; ingest into it first, or correct the path"
        )
