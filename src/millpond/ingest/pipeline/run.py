"""IngestRun: one run from a source to a sink."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from millpond.errors import InvalidRequestError, SinkUnavailableError
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.delivery import Delivery, RetryPolicy
from millpond.ingest.pipeline.embedder import EmbeddedRecords, EmbeddingCall, PlannedRecord, RecordEmbedder
from millpond.ingest.pipeline.journal import CollectionMarks
from millpond.ingest.pipeline.planner import PlanOptions, RecordBatch, RecordPlanner
from millpond.ingest.pipeline.seen import SeenRecords
from millpond.ingest.pipeline.source_items import SourceItems
from millpond.ingest.pipeline.verify import RecordSample, verify
from millpond.ingest.pipeline.writer import QUEUED_BATCHES, BatchWriter, BlankRecords
from millpond.ingest.record import Rejected
from millpond.ingest.sinks.protocol import Reads, Sink
from millpond.ingest.sources.dead_letter import dump_record, dump_rejected
from millpond.ingest.telemetry.counts import RunCounts
from millpond.ingest.telemetry.progress_bar import IngestProgress
from millpond.ingest.telemetry.report import IngestReport, Verification
from millpond.ingest.telemetry.trace import RunTrace

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

logger = logging.getLogger(__name__)

_CALLS_AHEAD = 2
_SCANNED_ROWS = 512
# A run that is stopped waits no longer for the engine.
_STOP_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class RunParts:
    """What a run works with, beside the source.

    Attributes:
        engine: The engine of the vectors.
        sparse_engine: The engine of the sparse vectors, of a hybrid sink.
        sink: Where to write; prepared.
        widths: The widths to store, ascending.
        marks: The journal's marks; ``None`` without a journal.
        letters: Where records go that are left out; ``None`` keeps them nowhere.
        plan: What decides which records are written.
        policy: When to ask the database again.
        sync: Delete the rows of records that the source no longer has.
        verify: Look for the rows after the run.
        stop: Ends the run early.
        trace: Where times and counts go.
        progress: The bar.
    """

    engine: Engine
    sparse_engine: Engine | None
    sink: Sink
    widths: list[int]
    marks: CollectionMarks | None
    letters: DeadLetterFile | None
    plan: PlanOptions
    policy: RetryPolicy
    sync: bool
    verify: bool
    stop: threading.Event
    trace: RunTrace
    progress: IngestProgress


class IngestRun:
    """One run from the source to the sink; it can be run once."""

    def __init__(self, parts: RunParts) -> None:
        self._engine = parts.engine
        self._sink = parts.sink
        self._marks = parts.marks
        self._letters = parts.letters
        self._stop = parts.stop
        self._trace = parts.trace
        self._progress = parts.progress
        self._counts = RunCounts(self._changed)
        self._seen = SeenRecords() if parts.sync else None
        self._sample = RecordSample() if parts.verify else None
        self._unknown = 0  # rejected lines, of which not even the id is known
        self._calls: deque[tuple[RecordBatch, EmbeddingCall | None]] = deque()
        self._calls_ahead: int = getattr(parts.engine, "calls_ahead", _CALLS_AHEAD)  # more where it has many workers
        self._delivery = Delivery(parts.policy, parts.stop, self._retrying)
        self._writer = BatchWriter(
            parts.sink, self._counts, delivery=self._delivery, marks=parts.marks, fail=self._fail, trace=parts.trace
        )
        self._embedder = RecordEmbedder(
            parts.engine,
            parts.widths,
            sparse_engine=parts.sparse_engine,
            trace=parts.trace,
            check=self._writer.check,
        )
        self._planner = RecordPlanner(
            parts.plan,
            self._counts,
            parts.marks,
            fail=self._fail,
            reject=self._reject,
            check_writer=self._writer.check,
            stop=parts.stop,
            trace=parts.trace,
            seen=self._seen,
            sample=self._sample,
        )

    def ingest(self, items: Iterable[Any]) -> IngestReport:
        """Write what the source yields; returns the counts."""
        cache = getattr(self._engine, "cache", None)
        uncached = getattr(cache, "unwritten", 0)
        source = SourceItems(items, self._stop)
        try:
            for batch in self._planner.batches(source):
                self._calls.append((batch, self._submit(batch)))
                # The engine works on the later calls while the oldest is finished here.
                if len(self._calls) > self._calls_ahead:
                    self._complete(*self._calls.popleft())
            self._drain()
            self._writer.finish()
        except BaseException as error:
            for _, call in self._calls:
                if call is not None:
                    call.cancel()
            self._writer.abandon()
            if not (isinstance(error, SinkUnavailableError) and self._stop.is_set()):
                raise
            logger.warning("stopped before everything was written, since %s", error)
        finally:
            self._counts.log_summary(self._engine.spec.max_length)
        if source.error is not None:
            raise source.error
        stopped = self._stop.is_set()
        verification = None if stopped else self._look_back()
        skipped = source.skipped
        lost = 0 if cache is None else getattr(cache, "unwritten", 0) - uncached
        report = self._counts.report(
            skipped=0 if skipped is None else skipped.count,
            skipped_files=() if skipped is None else skipped.names,
            uncached=lost,
            cache_error=getattr(cache, "write_error", None) if lost else None,
            stopped=stopped,
            verification=verification,
        )
        self._finish_progress(report)
        return report

    def _drain(self) -> None:
        """Finish the calls that are left."""
        while self._calls:
            self._complete(*self._calls.popleft())

    def _look_back(self) -> Verification | None:
        if isinstance(self._sink, Reads):
            if self._seen is not None:
                self._delete_unseen(self._sink, self._seen)
            if self._sample is not None and self._marks is not None:
                return verify(self._sink, self._marks, self._planner.sampled(), self._embedder, self._delivery)
        return None

    # -------------------------------------------------------------------------------------- what comes of the records

    def _submit(self, batch: RecordBatch) -> EmbeddingCall | None:
        return self._embedder.submit(batch.records) if batch.records else None

    def _complete(self, batch: RecordBatch, call: EmbeddingCall | None) -> None:
        if batch.blanks:
            self._writer.put(BlankRecords(records=batch.blanks))
        if call is None or not self._finished(call):
            return
        for result in self._embedder.complete(call):
            if not isinstance(result, EmbeddedRecords):
                self._fail(result.record, result.reason)
                continue
            self._counts.truncated(result.truncated_ids)
            hits = sum(result.cached)
            self._counts.add(cached=hits, embedded=len(result.records) - hits)
            self._writer.put(result)

    def _finished(self, call: EmbeddingCall) -> bool:
        """Wait for a call, unless the run is stopped and the rows computed for it are in the cache."""
        kept = getattr(self._engine, "cache", None) is not None
        with self._trace.stage("embed", len(call.records)):
            while not call.wait(_STOP_SECONDS):
                if kept and self._stop.is_set():
                    call.cancel()
                    return False
                self._counts.add()  # the curves and the bar go on
        return True

    def _reject(self, rejected: Rejected) -> None:
        """Leave out a line that holds no record."""
        self._counts.failed(rejected.where, rejected.reason)
        self._trace.note_failure(rejected.where, rejected.reason)
        if rejected.record_id is None:
            self._unknown += 1
        elif self._seen is not None:
            self._seen.add([rejected.record_id])
        if self._letters is not None:
            self._letters.add(dump_rejected(rejected))

    def _fail(self, planned: PlannedRecord, reason: str) -> None:
        """Leave out a record; called by the writer's thread, too."""
        where = f"record {planned.record.id!r}"
        self._counts.failed(where, reason)
        self._trace.note_failure(where, reason)
        if self._sample is not None:
            self._sample.drop(planned.key)
        if self._letters is not None:
            self._letters.add(dump_record(planned.record, where=where, reason=reason))

    def _retrying(self, error: BaseException, seconds: float) -> None:
        self._counts.add(retried=1)
        self._trace.note_retry(str(error))
        logger.warning("%s; trying again in %.1f s", error, seconds)

    def _delete_unseen(self, sink: Reads, seen: SeenRecords) -> None:
        """Delete the rows of records that the source no longer has."""
        if self._unknown:
            logger.error(
                "sync=True deleted nothing: %d records of the source could not be read, and their ids are not known; a "
                "row that the source seems to lack may be theirs. Mend them and run again",
                self._unknown,
            )
            return
        if not len(seen) and self._delivery.send(sink.count):
            raise InvalidRequestError(
                "the source holds no record, and sync=True would delete every row; leave sync out, or delete the rows "
                "by sink.delete"
            )
        self._delivery.send(lambda: _note_stale(sink, seen))
        for stale in seen.stale():
            row_ids = [row_id for row_id, _ in stale]
            if self._marks is not None:  # first, since a mark without its row would never be written again
                self._marks.remove({record_id for _, record_id in stale})
            self._delivery.send(lambda ids=row_ids: sink.delete_rows(ids))  # type: ignore[misc]
            self._counts.add(deleted=len(stale))

    def _changed(self, counts: Mapping[str, int]) -> None:
        """The counts have changed."""
        queues = {"embed": len(self._calls), "write": self._writer.queued}
        self._trace.sample(counts, queues)
        self._progress.update(
            read=counts["read"],
            finished=counts["finished"],
            cached=counts["cached"],
            embedded=counts["embedded"],
            failed=counts["failed"],
            retried=counts["retried"],
            queues={"embed": (queues["embed"], self._calls_ahead), "write": (queues["write"], QUEUED_BATCHES)},
        )

    def _finish_progress(self, report: IngestReport) -> None:
        counts = {
            name: getattr(report, name) for name in ("cached", "embedded", "failed", "retried", "read", "written")
        }
        self._trace.sample(counts, {}, last=True)
        if not report.stopped:
            self._progress.finish(
                finished=report.read,
                cached=report.cached,
                embedded=report.embedded,
                failed=report.failed,
                retried=report.retried,
            )


def _note_stale(sink: Reads, seen: SeenRecords) -> None:
    """Find the rows of records that were not seen; from the start again if the database does not answer."""
    seen.forget_stale()
    rows = sink.scan()
    while page := list(islice(rows, _SCANNED_ROWS)):
        seen.note_stale(page)
