"""RecordPlanner: which records of a source are embedded and written, in batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from millpond.blank import is_blank
from millpond.errors import InvalidRequestError
from millpond.ingest.chunking import is_chunk
from millpond.ingest.pipeline.embedder import PlannedRecord, record_key
from millpond.ingest.pipeline.journal import CollectionMarks, Mark, digest
from millpond.ingest.pipeline.seen import SeenRecords
from millpond.ingest.pipeline.verify import RecordSample
from millpond.ingest.record import Record, Rejected
from millpond.ingest.telemetry.counts import RunCounts
from millpond.ingest.telemetry.trace import RunTrace

# Records that are looked up in the journal at a time.
_PAGE_RECORDS = 512
# Batches that may be on their way between the planner and the journal, and some more.
_BATCHES_UNDER_WAY = 16
# The bar shows what was read so often.
_COUNT_SECONDS = 0.05
_UNKNOWN = Mark("", b"", 0)


class Splitter(Protocol):
    """Cuts long texts, as :class:`~millpond.ingest.Chunker` does."""

    @property
    def settings(self) -> str:
        """All that decides where a text is cut: with another value, every record is cut again."""

    def split(self, record: Record) -> Sequence[Record]:
        """The chunks of a record, at least one."""


class RecordBatch(NamedTuple):
    """Consecutive records of the source: those to embed, and those whose text is blank."""

    records: list[PlannedRecord]
    blanks: list[PlannedRecord]


class _Work(NamedTuple):
    """A record that is not written as it is.

    Attributes:
        record: The record.
        digest: Its digest, for the journal.
        stored: How many rows it has in the collection; ``None`` if that is not known.
        again: Whether an earlier record with this id may still be on its way.
    """

    record: Record
    digest: bytes
    stored: int | None
    again: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanOptions:
    """What decides which records are written.

    Attributes:
        batch_records: Most rows and blank records of a batch.
        batch_chars: Characters of text from which on a batch is full.
        keep_empty: Embed blank texts too.
        resume: Leave out the records that the journal knows.
        chunker: Cuts long texts; ``None`` leaves them whole.
        check: Raises InvalidRequestError for a row that the sink cannot store; ``None``: it stores all.
        fresh: The collection holds no rows but those of the journal.
    """

    batch_records: int
    batch_chars: int
    keep_empty: bool
    resume: bool
    chunker: Splitter | None
    check: Callable[[Record], object] | None
    fresh: bool


class RecordPlanner:
    """Goes through the records of a source, and leaves out those that are written already or cannot be stored.

    Args:
        options: What decides which records are written.
        counts: The counts of the run.
        marks: The journal's marks; ``None`` without a journal.
        fail: Called with a record that the sink cannot store, and the reason.
        reject: Called with a line that holds no record.
        check_writer: Called for every record; raises if writing has failed.
        stop: Once it is set, no further record is planned.
        trace: Where times go.
        seen: Gets the ids of the source, to delete the rows of others; ``None`` if that is not asked for.
        sample: Gets the records that the collection should hold; ``None`` if they are not verified.
    """

    def __init__(
        self,
        options: PlanOptions,
        counts: RunCounts,
        marks: CollectionMarks | None,
        *,
        fail: Callable[[PlannedRecord, str], object],
        reject: Callable[[Rejected], object],
        check_writer: Callable[[], object],
        stop: threading.Event,
        trace: RunTrace,
        seen: SeenRecords | None,
        sample: RecordSample | None,
    ) -> None:
        self._options = options
        self._counts = counts
        self._marks = marks
        self._fail = fail
        self._reject = reject
        self._check_writer = check_writer
        self._stop = stop
        self._trace = trace
        self._seen = seen
        self._sample = sample
        self._batches = 0
        # Ids that were planned of late, whose marks may still change, and those of the batches before.
        self._under_way: set[str] = set()
        self._under_way_before: set[str] = set()

    def batches(self, items: Iterable[Record | Rejected]) -> Iterator[RecordBatch]:
        """Batches of the records that are not written yet; of records with the same id in a batch, the last."""
        limit = self._options.batch_records
        records: dict[str, PlannedRecord] = {}
        blanks: dict[str, PlannedRecord] = {}
        rows = chars = 0
        for page in self._timed_pages(items):
            for planned in self._plan(page):
                key = planned.key
                if (former := records.pop(key, None)) is not None:
                    rows -= len(former.chunks)
                    chars -= len(former.record.text)
                    self._counts.add(duplicates=1, finished=1)
                if not planned.chunks:
                    blanks[key] = planned
                else:
                    blanks.pop(key, None)
                    records[key] = planned
                    rows += len(planned.chunks)
                    chars += len(planned.record.text)
                if rows + len(blanks) >= limit or chars >= self._options.batch_chars:
                    yield self._next_batch(records, blanks)
                    records, blanks, rows, chars = {}, {}, 0, 0
        if (records or blanks) and not self._stop.is_set():
            yield self._next_batch(records, blanks)

    def _next_batch(self, records: dict[str, PlannedRecord], blanks: dict[str, PlannedRecord]) -> RecordBatch:
        self._batches += 1
        if self._batches % _BATCHES_UNDER_WAY == 0:
            self._under_way_before = self._under_way
            self._under_way = set()
        return RecordBatch(records=list(records.values()), blanks=list(blanks.values()))

    def _timed_pages(self, items: Iterable[Record | Rejected]) -> Iterator[list[Record]]:
        pages = self._pages(items)
        while True:
            with self._trace.stage("read") as call:
                page = next(pages, None)
                call.rows = len(page or ())
            if page is None:
                return
            yield page

    def _pages(self, items: Iterable[Record | Rejected]) -> Iterator[list[Record]]:
        """A few records at a time, in which no id occurs twice; those that cannot be stored are left out."""
        size = min(_PAGE_RECORDS, self._options.batch_records)
        page: dict[str, Record] = {}
        chars = 0
        for item in self._counted(items):
            if self._stop.is_set():
                return
            self._check_writer()
            if isinstance(item, Rejected):
                self._reject(item)
                continue
            if blank := self._is_blank(item):
                self._counts.empty(item.id)
            elif self._options.chunker is None and not self._accepted(item, [item]):
                continue
            key = record_key(item)
            if (former := page.pop(key, None)) is not None and not self._is_blank(former):
                self._counts.add(duplicates=1, finished=1)
            page[key] = item
            chars += 0 if blank else len(item.text)
            if len(page) >= size or chars >= self._options.batch_chars:
                yield list(page.values())
                page, chars = {}, 0
        if page and not self._stop.is_set():
            yield list(page.values())

    def _counted(self, items: Iterable[Record | Rejected]) -> Iterator[Record | Rejected]:
        """The items, counted a few at a time."""
        count, due = 0, time.monotonic() + _COUNT_SECONDS
        try:
            for item in items:
                count += 1
                if (now := time.monotonic()) >= due:
                    self._counts.add(read=count)
                    count, due = 0, now + _COUNT_SECONDS
                yield item
        finally:
            self._counts.add(read=count)

    def _plan(self, page: Sequence[Record]) -> Iterator[PlannedRecord]:
        """What is to be done with the records of a page, but for those that are written already."""
        if self._seen is not None:
            self._seen.add(record.id for record in page)
        if self._marks is None:
            work = [_Work(record, b"", None, False) for record in page]
        else:
            work = self._changed_records(page, self._marks)
        for each in work:
            planned = self._planned(each)
            if planned is not None:
                yield planned

    def _changed_records(self, page: Sequence[Record], marks: CollectionMarks) -> list[_Work]:
        """The records that are not written as they are."""
        known = marks.find([record_key(record) for record in page])
        settings = "" if self._options.chunker is None else self._options.chunker.settings
        changed: list[_Work] = []
        unchanged = []
        for record in page:
            key = record_key(record)
            mark = known.get(key, _UNKNOWN)
            name = digest(record, settings)
            # What is written after the mark was read may be an earlier record of the source with this id.
            under_way = key in self._under_way or key in self._under_way_before
            stored: int | None = mark.chunks
            if under_way or not (mark.digest or mark is _UNKNOWN):
                stored = None  # the write that began may have left more rows than are known
            elif mark is _UNKNOWN and not self._options.fresh:
                stored = None
            if (
                self._options.resume
                and not under_way
                and name == mark.digest
                and (mark.chunks == 0) == self._is_blank(record)  # else keep_empty was another
            ):
                unchanged.append(record)
            else:
                changed.append(_Work(record, name, stored, under_way))
                self._under_way.add(key)
        # From here on the old marks do not hold: were the run killed, the new ones would be missing.
        if outdated := [key for each in changed if (key := record_key(each.record)) in known]:
            marks.unsettle(outdated)
        self._skip(unchanged)
        return changed

    def _planned(self, work: _Work) -> PlannedRecord | None:
        """A record cut into chunks; without chunks if it is blank, and ``None`` if it cannot be stored."""
        record = work.record
        if self._is_blank(record):
            if self._sample is not None:
                self._sample.drop(record_key(record))
            return PlannedRecord(record=record, chunks=[], digest=work.digest, again=work.again)
        chunks = self._split(record)
        if chunks is None or (self._options.chunker is not None and not self._accepted(record, chunks)):
            return None
        stored = 0 if is_chunk(record) else work.stored  # the row of a chunk has no others
        planned = PlannedRecord(
            record=record, chunks=chunks, digest=work.digest, stored_chunks=stored, again=work.again
        )
        if self._sample is not None:
            self._sample.offer([record])
        return planned

    def _skip(self, unchanged: Sequence[Record]) -> None:
        """Count records that the collection holds as they are; blank ones are counted already."""
        rows = [record for record in unchanged if not self._is_blank(record)]
        if rows:
            self._counts.add(cached=len(rows), unchanged=len(rows), finished=len(rows))
        if self._sample is not None:
            self._sample.offer(rows)

    def sampled(self) -> list[PlannedRecord]:
        """The records of the sample, as they were planned."""
        records = [] if self._sample is None else self._sample.records
        return [PlannedRecord(record=each, chunks=chunks) for each in records if (chunks := self._split(each))]

    def _split(self, record: Record) -> Sequence[Record] | None:
        """The chunks of a record; ``None`` if it cannot be cut, and is left out."""
        if self._options.chunker is None:
            return [record]
        try:
            with self._trace.stage("chunk", 1):
                return self._options.chunker.split(record)
        except InvalidRequestError as error:
            self._leave_out(record, [record], str(error))
            return None

    def _is_blank(self, record: Record) -> bool:
        return not self._options.keep_empty and is_blank(record.text)

    def _accepted(self, record: Record, chunks: Sequence[Record]) -> bool:
        """Whether the sink can store these rows of a record; else the record is left out."""
        if self._options.check is None:
            return True
        try:
            for chunk in chunks:
                self._options.check(chunk)
        except InvalidRequestError as error:
            self._leave_out(record, chunks, str(error))
            return False
        return True

    def _leave_out(self, record: Record, chunks: Sequence[Record], reason: str) -> None:
        if self._seen is not None:
            self._seen.add([record.id])
        self._fail(PlannedRecord(record=record, chunks=chunks), reason)
