"""RecordPlanner: which records of a source are embedded and written, in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from millpond.errors import InvalidRequestError
from millpond.ingest.chunking import is_chunk
from millpond.ingest.pipeline.comparison import changed_rows
from millpond.ingest.pipeline.delivery import RetryingWriter
from millpond.ingest.pipeline.embedder import PlannedRecord, record_key
from millpond.ingest.pipeline.journal import CollectionEntries, JournalEntry, digest
from millpond.ingest.pipeline.ledger import RunLedger
from millpond.ingest.pipeline.options import RunParts
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sinks.protocol import Checks, Reads
from millpond.support.blank import is_blank

# One engine call: enough texts to pack full batches, few enough that the progress bar moves and memory stays flat.
BATCH_RECORDS = 2048
BATCH_CHARS = 2 << 20
# Records that are looked up in the journal at a time.
_PAGE_RECORDS = 512
# Batches that may be on their way between the planner and the journal, and some more.
_BATCHES_IN_FLIGHT = 16
_UNKNOWN = JournalEntry("", b"", 0)


class RecordPlanner:
    """Goes through the records of a source, and leaves out those that are written already or cannot be stored.

    Three stages: pages of the source without what cannot be stored, the changed records of a page cut into chunks, and
    batches of these.
    """

    def __init__(
        self, parts: RunParts, ledger: RunLedger, check_writer: Callable[[], object], requests: RetryingWriter
    ) -> None:
        self._sink, self._requests = parts.sink, requests
        self._keep_blank, self._resume = parts.options.keep_blank, parts.options.resume
        self._chunker = parts.chunker
        self._check = parts.sink.check if isinstance(parts.sink, Checks) else None
        self._fresh = parts.chunker is None or parts.rows_before == 0  # no rows but those of the journal
        self._ledger = ledger
        self._counts = ledger.counts
        self._entries = parts.entries
        self._check_writer = check_writer
        self.planned = 0  # batches
        self._read_from = time.perf_counter()
        self._page: dict[str, Record] = {}  # by their keys, in which no id occurs twice
        self._blank: set[str] = set()  # keys of those whose text is blank
        self._page_chars = 0
        self._records: dict[str, PlannedRecord] = {}  # of the next batch
        self._rows = self._chars = 0
        # Ids that were planned of late, whose entries may still change, and those of the batches before.
        self._in_flight: set[str] = set()
        self._in_flight_before: set[str] = set()

    def add(self, item: Record | Rejected) -> bool:
        """Take the next item of the source, if it can be stored, into the page; returns whether the page is full."""
        self._counts.read += 1
        self._check_writer()
        if isinstance(item, Rejected):
            self._ledger.reject(item)
            return False
        blank = not self._keep_blank and is_blank(item.text)
        if blank:
            self._counts.blank(item.id)
        elif self._chunker is None and self._check is not None and not self._accepted(item, [item]):
            return False
        page, key = self._page, item.id if item.chunk == 0 else record_key(item)
        if page.pop(key, None) is not None:
            if key not in self._blank:
                self._counts.add(duplicates=1, finished=1)
            self._blank.discard(key)
        page[key] = item
        if blank:
            self._blank.add(key)
        else:
            self._page_chars += len(item.text)
        return len(page) >= min(_PAGE_RECORDS, BATCH_RECORDS) or self._page_chars >= BATCH_CHARS

    def batches(self, *, rest: bool = False) -> Iterator[list[PlannedRecord]]:
        """Batches of the records of the page that are not written yet; of records with the same id, the last.

        What does not fill a batch waits for the next page, but with ``rest``.
        """
        page, blank, self._page, self._blank, self._page_chars = self._page, self._blank, {}, set(), 0
        self._ledger.trace.note_stage("read", time.perf_counter() - self._read_from, len(page))
        records = self._records
        for planned in self._changes(page, blank) if page else ():
            key = planned.key
            if (former := records.pop(key, None)) is not None:
                self._rows -= len(former.chunks)
                self._chars -= len(former.record.text)
                self._counts.add(duplicates=1, finished=1)
            if planned.chunks:  # else its text is blank
                records[key] = planned
                self._rows += len(planned.chunks)
                self._chars += len(planned.record.text)
            if self._rows >= BATCH_RECORDS or self._chars >= BATCH_CHARS:
                yield self._next_batch()
                records = self._records
        if rest and self._records:
            yield self._next_batch()
        self._read_from = time.perf_counter()

    @property
    def waiting(self) -> bool:
        """Whether records of earlier pages wait for a batch to be full."""
        return bool(self._records)

    def sampled(self) -> list[PlannedRecord]:
        """The records of the ledger's sample, as they were planned."""
        records = [] if self._ledger.sample is None else self._ledger.sample.records
        return [PlannedRecord(record=each, chunks=chunks) for each in records if (chunks := self._split(each))]

    def _next_batch(self) -> list[PlannedRecord]:
        self.planned += 1
        if self.planned % _BATCHES_IN_FLIGHT == 0:
            self._in_flight_before = self._in_flight
            self._in_flight = set()
        batch, self._records, self._rows, self._chars = list(self._records.values()), {}, 0, 0
        return batch

    def _changes(self, page: Mapping[str, Record], blank: Collection[str]) -> Iterator[PlannedRecord]:
        """What is to be written of a page: the records that are not written as they are, cut into chunks."""
        self._ledger.deletions.see(record.id for record in page.values())
        if self._entries is None:
            changed = [self._whole(record, b"", None, False) for record in page.values()]
        else:
            changed = self._changed_records(page, blank, self._entries)
        if blank:
            blanks = [each for each in changed if each.key in blank]
            texts = [record for key, record in page.items() if key not in blank]
            self._ledger.deletions.note(blanks, texts)
        else:
            self._ledger.deletions.note([], list(page.values()))
        for each in changed:
            planned = self._chunked(each, blank=bool(blank) and each.key in blank)
            if planned is not None:
                yield planned

    def _changed_records(
        self, page: Mapping[str, Record], blank: Collection[str], entries: CollectionEntries
    ) -> list[PlannedRecord]:
        """The records that are not written as they are, not yet cut into chunks."""
        known = entries.find(list(page))
        changed: dict[str, PlannedRecord] = {}
        unchanged: list[Record] = []  # without the blank ones, which are counted
        doubtful: dict[str, PlannedRecord] = {}  # whose entry says that they are unchanged, and is not trusted
        for key, record in page.items():
            entry = known.get(key, _UNKNOWN)
            planned = self._planned(key, record, entry)
            # A blank record may have rows that an entry which is not trusted does not know.
            if not self._is_written(planned, entry, key in blank) or (entry.chunks == 0 and not entry.trusted):
                changed[key] = planned
            elif not entry.trusted:
                doubtful[key] = planned
            elif key not in blank:
                unchanged.append(record)
        for key in self._confirmed(doubtful, known, entries):
            record = doubtful.pop(key).record
            if key not in blank:
                unchanged.append(record)
        changed |= doubtful
        written = [key for key in changed if key not in blank] if blank else list(changed)
        self._in_flight.update(written)
        # From here on the old entries do not hold: were the run killed, the new ones would be missing. Those of blank
        # records hold until their rows are deleted.
        if outdated := [key for key in written if key in known]:
            entries.invalidate(outdated)
        self._note_unchanged(unchanged)
        return list(changed.values())

    @staticmethod
    def _whole(record: Record, digest: bytes, stored_chunks: int | None, id_in_flight: bool) -> PlannedRecord:
        """A record that is not cut into chunks, as long as nothing cuts it."""
        stored = 0 if is_chunk(record) else stored_chunks  # the row of a chunk has no others
        return PlannedRecord(record, [record], digest, stored, id_in_flight)

    def _planned(self, key: str, record: Record, entry: JournalEntry) -> PlannedRecord:
        """A record, not yet cut into chunks, by its entry."""
        # What is written after the entry was read may be an earlier record of the source with this id.
        in_flight = key in self._in_flight or key in self._in_flight_before
        # A write that began may have left more rows than are known.
        lasting = not in_flight and entry.trusted and (entry.digest or (entry is _UNKNOWN and self._fresh))
        settings = "" if self._chunker is None else self._chunker.settings
        return self._whole(record, digest(record, settings), entry.chunks if lasting else None, in_flight)

    def _is_written(self, planned: PlannedRecord, entry: JournalEntry, blank: bool) -> bool:
        """Whether the journal says that the collection has the record as it is."""
        return (
            self._resume
            and not planned.id_in_flight
            and planned.digest == entry.digest
            and (entry.chunks == 0) == blank  # else keep_blank was another
        )

    def _confirmed(
        self, doubtful: Mapping[str, PlannedRecord], known: Mapping[str, JournalEntry], entries: CollectionEntries
    ) -> list[str]:
        """The keys of those records whose rows are as the journal says, which is noted."""
        if not (doubtful and isinstance(self._sink, Reads)):
            return []
        split = {key: self._split(planned.record) for key, planned in doubtful.items()}
        rows = {key: chunks for key, chunks in split.items() if chunks}
        wrong = changed_rows(self._sink, self._requests, rows, chunked=self._chunker is not None)
        right = [key for key in rows if key not in wrong]
        entries.add(known[key] for key in right)
        return right

    def _note_unchanged(self, rows: Sequence[Record]) -> None:
        if rows:
            self._counts.add(cached=len(rows), unchanged=len(rows), finished=len(rows))
        if self._ledger.sample is not None:
            self._ledger.sample.offer(rows)
        if self._ledger.expected is not None:
            self._ledger.expected.note(rows)

    def _chunked(self, planned: PlannedRecord, *, blank: bool) -> PlannedRecord | None:
        """A record cut into chunks; without chunks if it is blank, and ``None`` if it cannot be stored."""
        record, sample = planned.record, self._ledger.sample
        if blank:
            if sample is not None:
                sample.drop(planned.key)
            return planned._replace(chunks=[])
        if self._chunker is not None:
            chunks = self._split(record)
            if chunks is None or not self._accepted(record, chunks):
                return None
            planned = planned._replace(chunks=chunks)
        if sample is not None:
            sample.offer([record])
        if self._ledger.expected is not None:
            self._ledger.expected.note([record])
        return planned

    def _split(self, record: Record) -> Sequence[Record] | None:
        """The chunks of a record; ``None`` if it cannot be cut, and is left out."""
        if self._chunker is None:
            return [record]
        try:
            with self._ledger.trace.stage("chunk", 1):
                return self._chunker.split(record)
        except InvalidRequestError as error:
            self._leave_out(record, [record], str(error))
            return None

    def _accepted(self, record: Record, chunks: Sequence[Record]) -> bool:
        """Whether the sink can store these rows of a record; else the record is left out."""
        if self._check is None:
            return True
        try:
            for chunk in chunks:
                self._check(chunk)
        except InvalidRequestError as error:
            self._leave_out(record, chunks, str(error))
            return False
        return True

    def _leave_out(self, record: Record, chunks: Sequence[Record], reason: str) -> None:
        self._ledger.deletions.see([record.id])
        self._ledger.fail(PlannedRecord(record=record, chunks=chunks), reason)
