"""ClusterRun: a run whose batches are embedded and written by the workers of a cluster."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from millpond.errors import SinkUnavailableError
from millpond.ingest.embedding import EmbeddingCall
from millpond.ingest.planning import RecordBatch
from millpond.ingest.ray.pool import WorkerDeathsError, WorkerPool
from millpond.ingest.ray.worker import WrittenBatch
from millpond.ingest.run import IngestRun, RunParts

# If more records in a row than this kill their workers, the machines are at fault and not the records.
_MAX_DEATHS = 4
_COUNTS = ("cached", "embedded", "written", "finished")


@dataclass(frozen=True, kw_only=True, eq=False)
class WritingCall(EmbeddingCall):
    """A batch that a worker embeds and writes."""

    dense: Future[Any]

    @property
    def result(self) -> WrittenBatch:
        """What came of it; waits for it."""
        written: WrittenBatch = self.dense.result()
        return written


class ClusterRun(IngestRun):
    """Plans on the driver, and marks on the driver what a worker says is written.

    Batches with a record in common are written one after the other, so that the last text of an id stays. Everything
    else is written in any order.

    Args:
        parts: What the run works with.
        pool: The workers; each opens the sink itself.
    """

    def __init__(self, parts: RunParts, pool: WorkerPool) -> None:
        super().__init__(parts)
        self._pool = pool
        self._deaths = 0  # records in a row that kill their workers
        self._in_flight: set[str] = set()  # ids of the records that workers have

    def _submit(self, batch: RecordBatch) -> EmbeddingCall | None:
        ids = {each.record.id for each in (*batch.records, *batch.blanks)}
        while not self._in_flight.isdisjoint(ids):
            self._complete(*self._calls.popleft())
        self._in_flight |= ids
        return WritingCall(records=batch.records, dense=self._pool.call("write", batch), sparse=None)

    def _complete(self, batch: RecordBatch, call: EmbeddingCall | None) -> None:
        assert isinstance(call, WritingCall)
        try:
            written = call.result
        except WorkerDeathsError as error:
            self._isolate(batch, error)
        else:
            self._deaths = 0
            self._note(batch, written)
        self._in_flight.difference_update(each.record.id for each in (*batch.records, *batch.blanks))

    def _isolate(self, batch: RecordBatch, error: WorkerDeathsError) -> None:
        """Send a batch that kills its workers again by halves, and leave out the records that do it alone."""
        if len(batch.records) + len(batch.blanks) == 1:
            self._deaths += 1
            if self._deaths > _MAX_DEATHS or not batch.records:
                raise error
            self._fail(batch.records[0], str(error))
            return
        middle = len(batch.records) // 2
        for half in (
            RecordBatch(batch.records[:middle], batch.blanks),
            RecordBatch(batch.records[middle:], []),
        ):
            if half.records or half.blanks:
                self._complete(
                    half, WritingCall(records=half.records, dense=self._pool.call("write", half), sparse=None)
                )

    def _note(self, batch: RecordBatch, written: WrittenBatch) -> None:
        """Count and mark what a worker has done."""
        for error, seconds in written.retries:
            self._retrying(SinkUnavailableError(error), seconds)
        for name, took, rows in written.stages:
            self._trace.note_stage(name, took, rows)
        self._trace.note_texts([len(chunk.text) for each in batch.records for chunk in each.chunks])
        if written.vectors is not None:
            self._trace.note_vectors(written.vectors)
        planned = {each.record.id: each for each in batch.records}
        for record_id, reason in written.failures:
            self._fail(planned[record_id], reason)
        if self._marks is not None and written.marks:
            with self._trace.stage("journal", len(written.marks)):
                self._marks.mark(written.marks)
        self._counts.truncated(written.truncated_ids)
        self._counts.add(**{name: written.counts.get(name, 0) for name in _COUNTS})

    def _drain(self) -> None:
        """Finish the batches that workers have; of a run that is stopped, the others are left for the next run."""
        if self._stop.is_set():
            self._pool.stop()
        while self._calls:
            batch, call = self._calls.popleft()
            assert isinstance(call, WritingCall)
            if not (self._stop.is_set() and call.dense.cancel()):
                self._complete(batch, call)
