"""RowCopy: brings a collection of another model into step with its source, by embedding what differs."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from millpond.errors import InvalidRequestError
from millpond.ingest.copying.source_ids import SourceIds
from millpond.ingest.pipeline.comparison import has_content
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.delivery import RetryingWriter, RetryPolicy
from millpond.ingest.pipeline.ingest import ingest
from millpond.ingest.pipeline.options import Splitter
from millpond.ingest.record import Record, Rejected, point_id
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.protocol import StoredRow
from millpond.ingest.sinks.stored_rows import stored_record
from millpond.ingest.sources.read import RecordReader
from millpond.ingest.telemetry.report import IngestReport

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.migrate.change import Records

_PAGE = 512
_SAMPLED = 256
_KEY = 17  # bytes of a row's key


class AsStored:
    """Leaves chunks as they are, in a collection that says that it has some."""

    settings = "as stored"

    def split(self, record: Record) -> Sequence[Record]:
        """The record."""
        return [record]


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyOptions:
    """How rows are copied.

    Attributes:
        rows_per_second: Most rows that are embedded and written a second; ``None`` for as many as can be.
        retry: How long to wait for a database that does not answer.
        stop: Once it is set, a pass ends.
        dead_letters: A file for the rows that cannot be embedded or stored.
        show_progress: Draw a progress bar, if standard error is a terminal.
    """

    rows_per_second: float | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    stop: threading.Event = field(default_factory=threading.Event)
    dead_letters: DeadLetterFile | None = None
    show_progress: bool = True


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one pass over the source did.

    Attributes:
        read: Rows that the new collection should have.
        written: Rows that it lacked, or that were different.
        deleted: Rows that the source has no more.
        failed: Records that could not be read, embedded or stored.
        seconds: How long it took.
    """

    read: int
    written: int
    deleted: int
    failed: int
    seconds: float

    @property
    def changed(self) -> int:
        """How many rows were not as they should be."""
        return self.written + self.deleted


class RowCopy:
    """Copies the rows of one collection to another one, whose engine embeds them.

    Nothing is remembered but in the new collection: a row is left out if that has it with this text and metadata. So a
    copy that was killed goes on from any machine.

    Args:
        source: The collection with the rows.
        target: The collection to bring into step; nobody else writes to it.
        engine: The engine of the target.
        sparse_engine: The engine of its sparse vectors; ``None`` for ``engine``.
        options: How rows are copied.
        records: Reads the source of the collection's records: these are taken from there, and other ones from
            ``source``.
        chunker: Cuts texts; ``None`` takes rows as they are.

    Attributes:
        source: The collection with the rows.
        target: The collection that is brought into step.
        sample: Some of the rows of the last pass, each with the same chance.
    """

    def __init__(
        self,
        source: CollectionSink[Any],
        target: CollectionSink[Any],
        *,
        engine: Engine,
        sparse_engine: Engine | None = None,
        options: CopyOptions | None = None,
        records: Records | None = None,
        chunker: Splitter | None = None,
    ) -> None:
        self.source, self.target = source, target
        self._engine, self._sparse = engine, sparse_engine
        self.options = options or CopyOptions()
        self._records, self._chunker = records, chunker
        self.sample: list[Record] = []
        self._requests = RetryingWriter(self.options.retry, self.options.stop, lambda error, seconds: None)
        self._from = 0.0
        self._sent = 0
        self._known: Any = np.zeros(0, f"S{_KEY}")  # the keys of the rows of the last pass

    def run(self) -> Pass:
        """Embed and write what differs, then delete what the source has no more; returns what was done."""
        start = time.monotonic()
        self._from, self._sent = start, 0
        expected = bytearray()  # the keys of all rows
        # A count sees every acknowledged write, also in Milvus, and what is read after it as much.
        before = self._requests.send(self.target.count)
        total = max(0, self._requests.send(self.source.count) - before)
        report = self._ingest(self._lacking(expected, self._items()), total=total)
        self._known = np.sort(np.frombuffer(bytes(expected), f"S{_KEY}"))
        stopped = report.stopped or self.options.stop.is_set()
        deleted = 0 if stopped or report.failed else self._drop_others()
        return Pass(
            read=len(expected) // _KEY,
            written=report.written,
            deleted=deleted,
            failed=report.failed,
            seconds=time.monotonic() - start,
        )

    def take_late(self) -> None:
        """Copy rows that the source got after the last pass listed it, and the target has not.

        They were on their way when the collections changed places. A row that the last pass saw is left alone: somebody
        may have changed or deleted it in the target since.
        """
        late = [row_id for row_id in self._ids() if not _has(self._known, row_id)]
        for start in range(0, len(late), _PAGE):
            part = late[start : start + _PAGE]
            there = self._requests.send(partial(self.target.fetch, part))
            self.fill([row_id for row_id in part if row_id not in there])

    def fill(self, row_ids: Sequence[str]) -> None:
        """Embed and write some rows of the source, as they are there."""
        self._from, self._sent = time.monotonic(), 0
        self._ingest(self._lacking(bytearray(), self._stored(row_ids)), total=len(row_ids))

    def _ingest(self, items: Iterator[Record | Rejected], *, total: int) -> IngestReport:
        chunked = self.target.own().chunked
        reader = RecordReader(items, total=total or None)
        reader.name = f"a migration of {self.source.target}"
        return ingest(
            reader,
            engine=self._engine,
            sparse_engine=self._sparse,
            sink=self.target,
            show_progress=self.options.show_progress and total > 0,
            keep_blank=True,
            dead_letters=self.options.dead_letters,
            chunking=(self._chunker or AsStored()) if chunked else None,
            retry=self.options.retry,
            stop=self.options.stop,
        )

    def _lacking(self, expected: bytearray, items: Iterator[Record | Rejected]) -> Iterator[Record | Rejected]:
        """What the target lacks, or has otherwise, at the rate that was asked for."""
        seen, self.sample = 0, []
        generator = random.Random(0)
        while page := list(islice(items, _PAGE)):
            records = [item for item in page if isinstance(item, Record)]
            yield from (item for item in page if isinstance(item, Rejected))
            ids = [point_id(record.id, record.chunk) for record in records]
            for row_id, record in zip(ids, records, strict=True):
                expected += _key(row_id)
                seen += 1
                if len(self.sample) < _SAMPLED:
                    self.sample.append(record)
                elif (place := generator.randrange(seen)) < _SAMPLED:
                    self.sample[place] = record
            stored = self._requests.send(partial(self.target.read_rows, ids))
            for row_id, record in zip(ids, records, strict=True):
                row: StoredRow | None = stored.get(row_id)
                if row is None or not has_content(row, record):
                    self._wait()
                    yield record

    def _items(self) -> Iterator[Record | Rejected]:
        known: set[str] = set()
        for item in () if self._records is None else self._records():
            if isinstance(item, Record):
                known.add(item.id)
                yield from self._cut(item)
            else:
                yield item
        for record in self._stored(self._ids()):
            if record.id not in known:
                yield from self._cut(record)

    def _stored(self, row_ids: Iterable[str]) -> Iterator[Record]:
        """Rows of the source, as records."""
        ids = iter(row_ids)
        while part := list(islice(ids, _PAGE)):
            page = self._requests.send(partial(self.source.read_rows, part))
            for row_id, row in page.items():
                yield stored_record(row_id, row)

    def _ids(self) -> Iterator[str]:
        """The ids of the source's rows. They are read first: a scan that lasts for hours may lose its place."""
        ids = SourceIds()
        self._requests.send(partial(ids.fill, self.source, self.options.stop))
        for page in ids.pages(_PAGE):
            yield from page

    def _cut(self, record: Record) -> Sequence[Record | Rejected]:
        if self._chunker is None:
            return [record]
        try:
            return self._chunker.split(record)
        except InvalidRequestError as error:
            return [Rejected(where=f"record {record.id!r}", reason=str(error), record_id=record.id)]

    def _wait(self) -> None:
        """Until the next row is due."""
        if (rate := self.options.rows_per_second) is not None:
            due = self._from + self._sent / rate
            self.options.stop.wait(max(0.0, due - time.monotonic()))
        self._sent += 1

    def _drop_others(self) -> int:
        """Delete the rows of the target that the source does not have; returns how many."""
        known = self._known
        doomed = self._requests.send(lambda: [row_id for row_id, _ in self.target.scan() if not _has(known, row_id)])
        for start in range(0, len(doomed), _PAGE):
            part = doomed[start : start + _PAGE]
            self._requests.send(partial(self.target.delete_rows, part))
        return len(doomed)


def _key(row_id: str) -> bytes:
    """The bytes of a UUID, and one that is not 0: numpy drops zeros at the end."""
    return uuid.UUID(row_id).bytes + b"\1"


def _has(known: Any, row_id: str) -> bool:
    try:
        wanted = _key(row_id)
    except ValueError:
        return False
    place = int(np.searchsorted(known, wanted))
    return place < len(known) and known[place] == wanted
