"""CollectionReader: the part of a sink that reads, of the collection itself or of the one that answers by its name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.ingest.sinks.bridge_rows import load_bridge
from millpond.ingest.sinks.chunk_rows import chunk_rows
from millpond.ingest.sinks.description import CollectionDescription, describe
from millpond.ingest.sinks.driver import CollectionDriver, NativeFilter
from millpond.ingest.sinks.fields import check_fields
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.protocol import StoredRow, check_widths
from millpond.ingest.sinks.raw_rows import RawRows
from millpond.ingest.sinks.run_note import RunNote
from millpond.ingest.sinks.succession import Succession, bridge_name
from millpond.values.fingerprint import ModelIdentity
from millpond.vectors.linear_map import Bridge

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")
Reader = TypeVar("Reader", bound="CollectionReader[Any]")

_CONNECTION = ("timeout", "prefer_grpc", "grpc_port")
"""Options of sinks that say how a database is reached, and nothing of a collection."""


def served(
    method: Callable[Concatenate[Reader, Arguments], Answer],
) -> Callable[Concatenate[Reader, Arguments], Answer]:
    """Let a method work on the collection that answers by the sink's name, for the whole call."""

    @wraps(method)
    def run(self: Reader, /, *args: Arguments.args, **options: Arguments.kwargs) -> Answer:
        return method(self.serving(), *args, **options)

    return run


class CollectionReader(Generic[NativeFilter]):
    """One collection of a database, which can be read; see :class:`~millpond.ingest.CollectionSink`."""

    def __init__(
        self,
        driver: CollectionDriver[NativeFilter],
        *,
        dimensions: Sequence[int] | None = None,
        fields: str | None = None,
        hybrid: bool = False,
    ) -> None:
        self._driver = driver
        self._connection = driver.connection
        self.database, self.collection = self._connection.database, self._connection.collection
        if hybrid not in (False, True):
            raise InvalidRequestError(f"hybrid={hybrid!r} must be True or False for {self.database}")
        if hybrid and not driver.hybrids:
            raise InvalidRequestError(
                f"hybrid=True: this sink of {self.database} stores no sparse vectors; leave it out"
            )
        self.hybrid = bool(hybrid)
        self.max_results = driver.max_results
        self.dimensions = check_widths(dimensions)
        self.options: Mapping[str, Any] = {}  # of the constructor, for sinks of other collections at this location
        self.follows = True  # whether another collection may answer by this one's name
        self._manifest: CollectionManifest | None = None
        self._fields = None if fields is None else check_fields(fields)
        self._read = 0.0  # when the manifest was, on the clock's seconds
        self._named: dict[str, CollectionReader[Any]] = {}  # sinks of other collections, which follow nothing
        self._naming = threading.Lock()
        self._bridges: dict[str, Bridge] = {}
        self.warned: set[Succession] = set()  # of which was said that the sink searches the former collection

    @property
    def manifest(self) -> CollectionManifest | None:
        """What the collection stores of its model and its form; ``None`` before it is opened."""
        own = self._manifest
        if own is None or not self.follows or own.succession is None or own.succession.serving == self.collection:
            return own
        serving = self._named.get(own.succession.serving)
        return None if serving is None else serving.manifest

    @manifest.setter
    def manifest(self, manifest: CollectionManifest | None) -> None:
        self._manifest = manifest

    @property
    def client(self) -> Any:
        """The database's own client."""
        return self._connection.client

    @property
    def target(self) -> str:
        """The database and the collection, as a journal names them: the same from any folder and in any process."""
        sink = self if self._manifest is None else self.serving()
        return sink._connection.target

    def is_same(self, other: CollectionReader[Any]) -> bool:
        """Whether another sink is one of the same collection, as both are stored now."""
        return self.answering()._connection.is_same(other.answering()._connection)

    @property
    def embedded(self) -> bool:
        """Whether the database runs inside this process: then nothing is written after a write that failed.

        The log of such a database may end in a torn record, behind which later writes are lost at the next start.
        """
        return self._connection.embedded

    @property
    def fusible(self) -> bool:
        """Whether the opened collection can be searched with ``hybrid=True``."""
        manifest = self.manifest
        return manifest is not None and (manifest.sparse is not None or self.serving()._driver.ranks_texts())

    @property
    def exhaustive(self) -> bool:
        """Whether a search compares every row in this process, and so goes by the largest width alone, unless told."""
        return self._driver.exhaustive

    @property
    def ranks_texts(self) -> bool:
        """Whether the database makes sparse vectors of the collection's texts itself."""
        return self._driver.ranks_texts()

    @served
    def open(self) -> CollectionManifest:
        """The manifest of a collection that exists, which is loaded on first use; :meth:`prepare` also creates one."""
        return self.own()

    def serving(self, *, fresh: bool = False) -> Self:
        """The sink of the collection that answers by this name: this one, unless ``millpond migrate`` has cut over.

        Args:
            fresh: Read the manifest again, though it was read less than a minute ago.

        Returns:
            A sink that follows no other.

        Raises:
            InvalidRequestError: The collection does not exist.
        """
        if not self.follows or self._connection.closed:
            return self
        succession = self.own(fresh=fresh).succession
        if succession is None or succession.serving == self.collection:
            return self
        return self.named(succession.serving)

    def answering(self) -> Self:
        """As :meth:`serving`; this sink if there is no such collection, or one that millpond did not make."""
        with suppress(FingerprintMismatchError, InvalidRequestError):
            return self.serving()
        return self

    def named(self, collection: str) -> Self:
        """A sink of a collection at the same location, or of a URL, which follows no other; :meth:`close` closes it.

        Args:
            collection: The name, this one's too, or a URL.

        Returns:
            The sink, the same one for each name.
        """
        with self._naming:
            if collection not in self._named:
                self._named[collection] = self.sibling(collection)
            return cast("Self", self._named[collection])

    def adopt(self, sink: Reader) -> Reader:
        """Keep a sink as the one of its collection's name, in place of another; :meth:`close` closes it.

        Args:
            sink: The sink, which follows no other.

        Returns:
            The same.
        """
        with self._naming:
            if (former := self._named.get(sink.collection)) is not None:
                former.close()
            self._named[sink.collection] = sink
        return sink

    def check_name(self, collection: str) -> None:
        """Raise InvalidRequestError for a name that no collection of the database can have.

        Args:
            collection: The name.

        Raises:
            InvalidRequestError: The database does not take it.
        """
        self._connection.check_name("collection", collection)

    def sibling(self, collection: str, *, bare: bool = False, **options: Any) -> Self:
        """Another sink of the same database, or of a URL, for the caller to close, which follows no other collection.

        Args:
            collection: The name of its collection, or a URL.
            bare: Leave out this one's options but those of the connection.
            **options: Options of the sink that are not this one's.

        Returns:
            The sink.

        Raises:
            InvalidRequestError: The URL is that of no collection's sink.
        """
        if ":" in collection:
            from millpond.ingest.sinks.database import open_sink

            opened: Any = open_sink(collection, **options)
            if not isinstance(opened, CollectionReader):
                raise InvalidRequestError(f"{collection.partition(':')[0]!r} only writes; it cannot be read")
        else:
            kept = {
                name: value
                for name, value in self.options.items()
                if name in _CONNECTION or not (bare or name == "dimensions")
            }
            if not bare and self._manifest is not None:
                kept["fields"] = self._manifest.fields
            opened = cast(Any, type(self))(self._connection.place, collection, **{**kept, **options})
        opened.follows = False
        return cast("Self", opened)

    def former(self) -> list[ModelIdentity]:
        """The model of the collection that a migration has filled or left, and which does not serve, if it is there."""
        found = self.own().succession
        if found is None or not found.other:
            return []
        with suppress(InvalidRequestError):
            return [self.named(found.other).own().identity]
        return []

    def bridge(self, new: str) -> Bridge:
        """The bridge of the migration to a collection, which is read once.

        Args:
            new: The name or URL of the new collection.

        Returns:
            The bridge.

        Raises:
            SinkError: It is not there, or damaged.
        """
        if new not in self._bridges:
            name = bridge_name(new)
            side: Any = self.sibling(name, bare=True)
            try:
                self._bridges[new] = load_bridge(side, name)
            finally:
                side.close()
        return self._bridges[new]

    def collections(self) -> list[str]:
        """Names of all collections at this location, whoever made them, in alphabetical order."""
        return self._connection.listed()

    def describe(self) -> CollectionDescription:
        """What the database stores of the collection itself, which is not loaded for that."""
        return describe(self._connection, self._driver)

    def raw(self) -> RawRows:
        """Every row as the database holds it, also of a collection that millpond did not make."""
        if not self._connection.found():
            raise self._connection.missing()
        sink = self.answering()
        return RawRows(sink._connection, sink._driver)

    def succession(self) -> Succession | None:
        """Which collections answer by this name, as it is stored now; ``None``: this one."""
        return self.own(fresh=True).succession

    def note_succession(self, succession: Succession | None) -> None:
        """Store which collections answer by this name.

        Args:
            succession: The collections; ``None`` for this one.

        Raises:
            SinkError: The database refuses, or cannot store it.
        """
        noted = replace(self._stored_manifest(), succession=succession)
        self._connection.request("a note of the succession", lambda: self._driver.store_manifest(noted))
        self._manifest = noted

    def close(self) -> None:
        """Close the client, unless it was passed in; from then on requests raise SinkError."""
        with self._naming:
            for sink in self._named.values():
                sink.close()
            self._named.clear()
        self._connection.close()

    @served
    def fetch(self, row_ids: Sequence[str], *, widths: Sequence[int] = ()) -> dict[str, StoredRow]:
        """Those of these rows that exist, by their ids, with their vectors of some widths.

        Args:
            row_ids: Any number of row ids.
            widths: The widths of the vectors to read; empty for none.

        Returns:
            For each row id that exists, the row with its vectors ``[width]``.

        Raises:
            InvalidRequestError: The collection does not exist.
        """
        return self._look(self._driver.fetch, row_ids, widths)

    @served
    def read_rows(self, row_ids: Sequence[str], *, widths: Sequence[int] = ()) -> dict[str, StoredRow]:
        """As :meth:`fetch`, with the texts and the metadata as users see them.

        Args:
            row_ids: Any number of row ids.
            widths: The widths of the vectors to read; empty for none.

        Returns:
            For each row id that exists, the row.

        Raises:
            InvalidRequestError: The collection does not exist.
        """
        return self._look(self._driver.read, row_ids, widths)

    @served
    def last_run(self) -> str:
        """The id of the run that changed the collection last, as it is stored now; empty if there is none."""
        return self._stored_manifest().run

    @served
    def note_run(self, run: str, note: RunNote | None = None) -> None:
        """Store the id of a run in the collection's metadata.

        Args:
            run: The id.
            note: What the run reads and how, which is kept with the notes of earlier runs.

        Raises:
            SinkError: The database refuses, or cannot store it.
        """
        noted = self._stored_manifest().noting(run, note)
        self._connection.request("a note of the run", lambda: self._driver.store_manifest(noted))
        self._manifest = noted

    @served
    def chunks_from(self, first: Mapping[str, int]) -> list[str]:
        """Row ids of records' chunks from a number on, the last ones first; none if the collection holds no chunks.

        They are looked for by their own ids, until one is absent. Whoever deletes them in this order leaves no gap, and
        can be interrupted.

        Args:
            first: For each record id, the number of the first chunk to look for.

        Returns:
            A list of row ids.

        Raises:
            InvalidRequestError: The collection does not exist.
        """
        return chunk_rows(partial(self._look, self._driver.fetch), first) if self.own().chunked else []

    @served
    def scan(self) -> Iterator[tuple[str, str]]:
        """The row id and the record id of every row; of a framework's own row both are the row's id."""
        pages = self._driver.scan(self.own())
        while (page := self._connection.request("a scan", lambda: next(pages, None))) is not None:
            yield from page

    @served
    def row_ids(self, record_id: str) -> list[str]:
        """The row ids that a record may have, without those of its chunks from 1 on: millpond's, and a framework's.

        Args:
            record_id: The id of a record, or of a row that a framework wrote.

        Returns:
            A list of row ids, as a scan shows them; at least one.
        """
        return [str(each) for each in self._driver.row_ids(record_id, self.own())]

    def count(self) -> int:
        """How many rows the collection holds; 0 before it is created."""
        if not self._connection.found():
            return 0
        sink = self.answering()
        sink._driver.load()
        return sink._connection.request("a count", sink._driver.count)

    def own(self, *, fresh: bool = False) -> CollectionManifest:
        """The manifest of the collection itself, whatever answers by its name.

        Args:
            fresh: Read it again, though it was read less than a minute ago.

        Returns:
            The manifest.

        Raises:
            InvalidRequestError: The collection does not exist.
        """
        manifest = self._manifest
        if manifest is None:
            if not self._connection.found():
                raise self._connection.missing()
            manifest = self._stored_manifest()
            self._driver.load()
            self._manifest = manifest
        elif fresh or time.monotonic() - self._read > self._driver.trusted:
            manifest = self._manifest = self._stored_manifest()  # an alias may name another collection by now
        return manifest

    def _look(
        self,
        read: Callable[[Sequence[str], Sequence[int], CollectionManifest], Mapping[str, StoredRow]],
        row_ids: Sequence[str],
        widths: Sequence[int] = (),
    ) -> dict[str, StoredRow]:
        manifest = self.own()
        rows: dict[str, StoredRow] = {}
        for part in self._parts(row_ids):
            words = f"a look at {len(part)} {self._connection.row}s"
            rows.update(self._connection.request(words, partial(read, part, tuple(widths), manifest)))
        return rows

    def _parts(self, row_ids: Sequence[Answer]) -> Iterator[Sequence[Answer]]:
        """As many ids at a time as a request takes."""
        size = self._connection.max_rows
        return (row_ids[start : start + size] for start in range(0, len(row_ids), size))

    def _stored_manifest(self) -> CollectionManifest:
        self._read = time.monotonic()
        return CollectionManifest.from_dict(self._connection.stored_manifest(), collection=self.collection)
