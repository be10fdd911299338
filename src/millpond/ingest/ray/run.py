"""ClusterRun: a run whose batches are embedded and written by the workers of a cluster."""

from __future__ import annotations

from typing import cast

from millpond.errors import SinkUnavailableError
from millpond.ingest.pipeline.embedder import EmbeddingCall, PlannedRecord
from millpond.ingest.pipeline.options import RunParts
from millpond.ingest.pipeline.run import IngestRun
from millpond.ingest.ray.pool import CALLS_PER_WORKER, WorkerDeathsError, WorkerPool
from millpond.ingest.ray.worker import WrittenBatch

# If more records in a row than this kill their workers, the machines are at fault and not the records.
_MAX_DEATHS = 4
# How often a run that waits looks whether it is stopped.
_STOP_SECONDS = 0.2
_COUNTS = ("cached", "embedded", "written", "finished")


class ClusterRun(IngestRun):
    """Plans on the driver, and enters in the journal on the driver what a worker says is written.

    A run that is stopped waits for the batches that workers have; the others are left for the next run. Batches with a
    record in common are written one after the other, so that the last text of an id stays. Everything else is written
    in any order.
    """

    def __init__(self, parts: RunParts, pool: WorkerPool) -> None:
        super().__init__(parts, calls_ahead=CALLS_PER_WORKER * pool.workers)
        self._pool = pool
        self._deaths = 0  # records in a row that kill their workers
        self._in_flight: set[str] = set()  # ids of the records that workers have

    def _submit(self, batch: list[PlannedRecord]) -> EmbeddingCall:
        ids = {each.record.id for each in batch}
        while not self._in_flight.isdisjoint(ids):
            self._complete(*self._calls.popleft())
        self._in_flight |= ids
        if self._entries is not None and (keys := [each.key for each in batch if each.id_in_flight]):
            self._entries.invalidate(keys)  # by now those batches are written, and entered
        return self._write(batch)

    def _write(self, batch: list[PlannedRecord]) -> EmbeddingCall:
        return EmbeddingCall(records=batch, dense=self._pool.call("write", batch), sparse=None)

    def _complete(self, batch: list[PlannedRecord], call: EmbeddingCall) -> None:
        try:
            # A run that is stopped leaves out what no worker has yet.
            while not (cancelled := self._leaves_out() and call.dense.cancel()) and not call.wait(_STOP_SECONDS):
                if self._leaves_out():
                    self._pool.stop()
            if not cancelled:
                self._note(batch, cast("WrittenBatch", call.dense.result()))
        except WorkerDeathsError as error:
            self._bisect_deaths(batch, error)
        self._in_flight.difference_update(each.record.id for each in batch)

    def _bisect_deaths(self, batch: list[PlannedRecord], error: WorkerDeathsError) -> None:
        """Send a batch that kills its workers again by halves, and leave out the records that do it alone."""
        if len(batch) == 1:
            self._deaths += 1
            if self._deaths > _MAX_DEATHS:
                raise error
            self._ledger.fail(batch[0], str(error))
            return
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            self._complete(half, self._write(half))

    def _note(self, batch: list[PlannedRecord], written: WrittenBatch) -> None:
        """Count and enter what a worker has done."""
        self._deaths = 0
        for error, seconds in written.retries:
            self._ledger.retrying(SinkUnavailableError(error), seconds)
        for name, took, rows in written.stages:
            self._trace.note_stage(name, took, rows)
        self._trace.note_texts([len(chunk.text) for each in batch for chunk in each.chunks])
        planned = {each.key: each for each in batch}
        for key, reason in written.failures:
            self._ledger.fail(planned[key], reason)
        if self._entries is not None and written.entries:
            with self._trace.stage("journal", len(written.entries)):
                self._entries.add(written.entries)
        self._counts.truncated(written.truncated_ids)
        self._counts.add(**{name: written.counts.get(name, 0) for name in _COUNTS})
