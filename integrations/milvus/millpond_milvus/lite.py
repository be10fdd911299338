"""Milvus Lite's files: opening one, saying why it cannot be opened, and writing no more after a write that failed."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pymilvus
from pymilvus import MilvusClient
from pymilvus.exceptions import ConnectionConfigException

from millpond.errors import InvalidRequestError, MissingExtraError, SinkError

logger = logging.getLogger(__name__)

# Rows in Milvus Lite's memory from which on they are sealed before a search, which copies them one by one in Python, at
# some 30 us each. Writing them to a file costs some 10 ms, and 100 us each.
_MANY = 256

lite_lock = threading.RLock()
"""Held while a file of Milvus Lite is opened and a collection of it created, which Lite takes from one thread only."""


class LiteFile:
    """A file of Milvus Lite as this process has it open, until a write to it fails: then it has to be opened again.

    Lite appends every change to a log. A write that fails leaves a torn record there, and at the next start Lite reads
    no further than that: what it acknowledged later is lost. So every sink and index of the file shares this object.
    """

    def __init__(self, path: str) -> None:
        self.path = path  # of a folder really
        self.failure: str | None = None  # why a write failed
        self.acknowledged: dict[str, int] = {}  # rows of collections that a failure may have cost, counted right after
        self.warned: set[str] = set()  # collections of which was said that they are too large
        self._writing = threading.RLock()
        self._hidden: set[str] = set()  # collections of which Lite's memory was neither kept nor written to a file
        self._turn = threading.Condition()  # of what follows
        self._readers, self._sealing = 0, False

    @contextmanager
    def change(
        self, collection: str, *, count: Callable[[], int], harmless: Callable[[Exception], bool]
    ) -> Iterator[None]:
        """Around a request that changes a collection; one at a time, and none after one that failed.

        ``count`` counts its rows, and ``harmless`` says whether an error was raised before anything was written.
        """
        with self._writing:
            if self.failure is not None:
                raise SinkError(
                    f"Milvus Lite at {self.path} takes no more writes, since one failed in this process "
                    f"({self.failure}), and what follows might be lost; close it, open it again and verify"
                )
            try:
                yield
            except BaseException as error:
                if not isinstance(error, Exception) or not harmless(error):
                    self.failure = str(error) or repr(error)
                    with suppress(Exception):
                        self.acknowledged[collection] = count()
                raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a request that reads: rows that are being sealed are for a moment neither in memory nor in a file."""
        with self._turn:
            self._turn.wait_for(lambda: not self._sealing)
            self._readers += 1
        try:
            yield
        finally:
            with self._turn:
                self._readers -= 1
                self._turn.notify_all()

    def seal(self, collection: str) -> None:
        """Write what Lite holds of a collection in memory to a file, if it is much: every search would copy it.

        Whoever wrote it: another client, or an earlier process whose log was read when the file was opened.

        Raises:
            SinkError: It cannot be written, now or before: then no search would find these rows.
        """
        if self._in_memory(collection) >= _MANY:
            with self._writing, self._alone():
                stored = _collection(self.path, collection)
                if stored is not None and self.failure is None and self._in_memory(collection) >= _MANY:
                    try:
                        stored.flush()
                    except Exception as error:
                        self.failure = str(error) or repr(error)
                        self._hidden.add(collection)
        if collection in self._hidden:
            raise SinkError(
                f"Milvus Lite at {self.path} could not write rows of collection {collection!r} from its memory to a "
                f"file ({self.failure}), and finds them no more until it is opened again; give it room, close every "
                "sink and index of the file, and open them again"
            )

    def _in_memory(self, collection: str) -> int:
        """How many rows Lite holds in memory; 0 if this version does not say."""
        memory = getattr(_collection(self.path, collection), "_memtable", None)
        return 0 if memory is None else int(memory.size())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While nothing is read."""
        with self._turn:
            self._turn.wait_for(lambda: not self._sealing)
            self._sealing = True
            self._turn.wait_for(lambda: not self._readers)
        try:
            yield
        finally:
            with self._turn:
                self._sealing = False
                self._turn.notify_all()

    def verify(self, collection: str, count: Callable[[], int]) -> None:
        """Raise SinkError, once, if a collection has fewer rows than were acknowledged before the file was reopened."""
        if self.failure is None and (before := self.acknowledged.pop(collection, None)) is not None:
            now = count()
            if now < before:
                raise SinkError(
                    f"collection {collection!r} of Milvus Lite at {self.path} holds {now} rows, and {before} before "
                    "the write that failed; write its records again (with resume=False, if the run has a journal)"
                )


_files: dict[str, LiteFile] = {}


def open_file(path: str) -> tuple[MilvusClient, LiteFile]:
    """A client of a file, which Milvus Lite serves once per process; a file whose write failed is opened anew."""
    try:
        import milvus_lite  # noqa: F401
        from milvus_lite.server_manager import server_manager_instance as servers
    except ImportError:
        raise MissingExtraError("a *.db file needs Milvus Lite: pip install milvus-lite") from None
    # Lite knows a file by its path as it is written; of two threads that ask for it at once, the second would be told
    # that another process has it.
    real = os.path.realpath(path)
    # The client pings every 10 s by default; Lite's server closes an idle connection that pings.
    no_pings = {"grpc.keepalive_time_ms": 2**31 - 1, "grpc.keepalive_permit_without_calls": False}
    with lite_lock:
        file = _files.get(real)
        if file is not None and file.failure is not None:
            servers.release_server(real)
            again = LiteFile(real)
            again.acknowledged = file.acknowledged
            file = None
        else:
            again = LiteFile(real)
        served = real in getattr(servers, "_servers", {})
        with _cause_of_failure() as causes:
            try:
                client = MilvusClient(real, grpc_options=no_pings, **own_connection())
            except ConnectionConfigException as error:
                raise _reason(path, causes[-1] if causes else error) from error
        if not served:
            _report_torn_logs(Path(real))
        if file is None:
            file = _files[real] = again
        return client, file


def own_connection() -> dict[str, str]:
    """A client's argument that pymilvus 2 needs, whose clients of a place otherwise close each other's connection."""
    return {} if pymilvus.__version__ >= "3" else {"alias": f"millpond-{uuid.uuid4()}"}


def file_of(client: MilvusClient) -> LiteFile:
    """The file that a client of Milvus Lite uses, which somebody else opened."""
    with suppress(Exception):
        port = int(client._get_connection().server_address.rpartition(":")[2])
        for path, (_, _, served) in _servers().items():
            if served == port:
                return _files.setdefault(os.path.realpath(path), LiteFile(os.path.realpath(path)))
    return LiteFile("the client passed in")


def _servers() -> Mapping[str, Any]:
    """What Milvus Lite serves in this process: of each path a gRPC server, the database and its port."""
    from milvus_lite.server_manager import server_manager_instance as servers

    return dict(servers._servers)


def _collection(path: str, name: str) -> Any:
    """Milvus Lite's own object of a collection; ``None`` if it is not served here, or by another version's means."""
    with suppress(Exception):
        served = _servers()
        _, database, _ = served.get(path) or next(each for key, each in served.items() if os.path.realpath(key) == path)
        return database.get_collection(name)
    return None


@contextmanager
def _cause_of_failure() -> Iterator[list[BaseException]]:
    """The exceptions that Milvus Lite logs instead of raising them, when it cannot serve a file."""
    causes: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            causes.append(record.exc_info[1])
            return False
        return True

    log = logging.getLogger("milvus_lite.server_manager")
    log.addFilter(keep)
    try:
        yield causes
    finally:
        log.removeFilter(keep)


def _reason(path: str, error: BaseException) -> Exception:
    """Why a file cannot be opened."""
    if type(error).__name__ == "DataDirLockedError":
        return SinkError(
            f"{path!r} cannot be opened: another process uses it (Milvus Lite serves one at a time, until it ends; "
            "run a Milvus server, which any number of processes may use, and pass its URL)"
        )
    if isinstance(error, FileExistsError | NotADirectoryError) or (os.path.exists(path) and not os.path.isdir(path)):
        return InvalidRequestError(
            f"{path!r} is a file, as milvus-lite 2 wrote them, and no database of Milvus Lite 3, which is a folder; "
            "choose another name"
        )
    if isinstance(error, OSError):
        return SinkError(
            f"{path!r} cannot be opened, and Milvus Lite writes even to read: {error.strerror or error} "
            f"({error.filename or path}); give it a folder of its own, with room"
        )
    return SinkError(f"{path!r} cannot be opened: it is no database of Milvus Lite, or a damaged one ({error!r})")


def _report_torn_logs(path: Path) -> None:
    """Log which of Lite's logs end in a torn record, behind which nothing is read."""
    for log in sorted(path.glob("**/wal/wal_*.arrow")):
        writes, rest = _readable(log)
        if rest:
            logger.warning(
                "Milvus Lite's log %s is torn after %d writes: its last %d bytes, of a write that failed or was cut "
                "off and of any after it, are not there; verify the collection, or write its records again",
                log,
                writes,
                rest,
            )


def _readable(log: Path) -> tuple[int, int]:
    """How many records of a log can be read, and how many bytes are behind them."""
    pa = import_module("pyarrow")  # Lite needs it

    writes, end, size = 0, 0, log.stat().st_size
    if not size:
        return 0, 0
    with pa.memory_map(str(log)) as source:
        try:
            reader: Any = pa.ipc.open_stream(source)
            end = source.tell()
            for _ in reader:  # maps the rows, and does not read them
                writes, end = writes + 1, source.tell()
        except (pa.ArrowInvalid, OSError):
            return writes, size - end
    return writes, 0
