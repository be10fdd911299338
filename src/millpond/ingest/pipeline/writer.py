"""BatchWriter: the thread that writes to the sink, and enters in the journal what is written."""

from __future__ import annotations

import queue
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from millpond.ingest.pipeline.delivery import RetryingWriter
from millpond.ingest.pipeline.embedder import EmbeddedRecords, PlannedRecord
from millpond.ingest.pipeline.journal import CollectionEntries, JournalEntry
from millpond.ingest.pipeline.ledger import RunLedger
from millpond.ingest.record import point_id
from millpond.ingest.sinks.protocol import ChunkedRows, Reads, Sink

QUEUED_BATCHES = 2
# Rows of one write. A run can only be stopped between writes, and one may take seconds.
_WRITE_RECORDS = 512


class BatchWriter:
    """A thread that writes batches from a bounded queue. After a failure it drains the queue, so that no put blocks."""

    def __init__(
        self, sink: Sink, requests: RetryingWriter, ledger: RunLedger, entries: CollectionEntries | None
    ) -> None:
        self._sink = sink
        self._requests = requests
        self._ledger = ledger
        self._counts = ledger.counts
        self._trace = ledger.trace
        self._entries = entries
        self._queue: queue.Queue[EmbeddedRecords | None] = queue.Queue(QUEUED_BATCHES)
        self._failure: BaseException | None = None
        self._dropping = False
        # A daemon, so that a database that never answers cannot keep the program from ending.
        self._thread = threading.Thread(target=self._work, name="millpond-writer", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """How many batches wait."""
        return self._queue.qsize()

    def check(self) -> None:
        """Raise the error that stopped the writing, if there is one."""
        if self._failure is not None:
            raise self._failure

    def put(self, batch: EmbeddedRecords) -> None:
        """Queue a batch; blocks while the queue is full."""
        self.check()
        self._queue.put(batch)

    def finish(self) -> None:
        """Wait until everything queued is written."""
        self._queue.put(None)
        self._thread.join()
        self.check()

    def abandon(self) -> None:
        """Drop the queued batches and wait for the current write."""
        self._dropping = True
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self._dropping or self._failure is not None:
                continue
            try:
                self._invalidate(batch.records)
                rejected: dict[int, str] = {}
                for rows, completed in _parts(batch):
                    if self._dropping:
                        break
                    self._write(batch, rows, rejected)
                    self._enter(completed, batch, rejected)
            except BaseException as error:  # raised again in the caller's thread
                self._failure = error

    def _invalidate(self, records: Sequence[PlannedRecord]) -> None:
        """Invalidate what earlier records with these ids got in this run: were it killed, they would be wrong."""
        if self._entries is not None and (keys := [each.key for each in records if each.id_in_flight]):
            self._entries.invalidate(keys)

    def _write(self, batch: EmbeddedRecords, rows: slice, rejected: dict[int, str]) -> None:
        """Write some rows; those that the database refuses are added to ``rejected``."""
        part = batch.batch if rows.stop - rows.start == len(batch.batch) else batch.batch.part(rows)
        with self._trace.stage("write", len(part)):
            refused = self._requests.write(self._sink.write, part)
        self._counts.add(written=len(part) - len(refused))
        rejected |= {rows.start + row: reason for row, reason in refused}

    def _enter(self, completed: Sequence[int], batch: EmbeddedRecords, rejected: Mapping[int, str]) -> None:
        """Enter the records of which every row is written; of those with a refused one no row stays behind."""
        # The rows of a batch are in the order of its records.
        reasons: dict[int, str] = {}
        for row, reason in rejected.items():
            reasons.setdefault(bisect_right(batch.ends, row), reason)
        written = []
        for index in completed:
            record = batch.records[index]
            if index not in reasons:
                written.append(record)
                continue
            self._counts.add(**({"cached": -1} if batch.cached[index] else {"embedded": -1}))
            self._ledger.fail(record, reasons[index])
            if len(record.chunks) > 1 and isinstance(self._sink, Reads):
                self._drop_stale_chunks([record], batch)  # first: behind a gap no later run would find them
                row_ids = [point_id(chunk.id, chunk.chunk) for chunk in reversed(record.chunks)]
                self._requests.send(partial(self._sink.delete_rows, row_ids))
        self._drop_stale_chunks(written, batch)
        if self._entries is not None and written:
            with self._trace.stage("journal", len(written)):
                self._entries.add(JournalEntry(each.key, each.digest, len(each.chunks)) for each in written)
        self._counts.add(finished=len(written))

    def _drop_stale_chunks(self, records: Sequence[PlannedRecord], batch: EmbeddedRecords) -> None:
        """Delete the rows of longer texts that these records had before, but none of the batch itself."""
        if not isinstance(self._sink, ChunkedRows):
            return
        sink, stale = self._sink, []
        unknown: dict[str, int] = {}
        for each in records:
            if each.stored_chunks is None:
                unknown[each.record.id] = len(each.chunks)
            else:
                # The last ones first, so that an interrupted deletion leaves no gap.
                numbers = range(each.stored_chunks - 1, len(each.chunks) - 1, -1)
                stale += [point_id(each.record.id, number) for number in numbers]
        if unknown:
            self._requests.send(lambda: stale.extend(sink.chunks_from(unknown)))
        if stale:  # a source may hold pieces of its own beside the first one
            own = set(batch.batch.ids)
            stale[:] = [row_id for row_id in stale if row_id not in own]
        if stale:
            self._requests.send(lambda: sink.delete_rows(stale))


def _parts(batch: EmbeddedRecords) -> Iterator[tuple[slice, range]]:
    """The rows of each write, and the records whose last row is among them."""
    done = 0
    for start in range(0, len(batch.batch), _WRITE_RECORDS):
        stop, first = min(start + _WRITE_RECORDS, len(batch.batch)), done
        while done < len(batch.ends) and batch.ends[done] <= stop:
            done += 1
        yield slice(start, stop), range(first, done)
