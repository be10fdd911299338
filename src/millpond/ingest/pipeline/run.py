"""IngestRun: one run from a source to a sink."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from millpond.errors import SinkUnavailableError
from millpond.ingest.pipeline.deletions import Deletions
from millpond.ingest.pipeline.delivery import RetryingWriter, RetryPolicy
from millpond.ingest.pipeline.embedder import EmbeddedRecords, EmbeddingCall, PlannedRecord, RecordEmbedder
from millpond.ingest.pipeline.ledger import RunLedger
from millpond.ingest.pipeline.options import RunParts, context_of
from millpond.ingest.pipeline.page_timer import PageTimer
from millpond.ingest.pipeline.planner import RecordPlanner
from millpond.ingest.pipeline.source_items import SourceItems
from millpond.ingest.pipeline.verify import verify
from millpond.ingest.pipeline.writer import QUEUED_BATCHES, BatchWriter
from millpond.ingest.sinks.protocol import Deletes, Reads
from millpond.ingest.sources.read import RecordReader
from millpond.ingest.telemetry.progress_bar import IngestProgress
from millpond.ingest.telemetry.report import IngestReport

logger = logging.getLogger(__name__)

_CALLS_AHEAD = 2
# A run that is stopped waits no longer for the engine.
_STOP_SECONDS = 0.2


class IngestRun:
    """One run from the source to the sink; it can be run once."""

    def __init__(self, parts: RunParts, *, calls_ahead: int = _CALLS_AHEAD) -> None:
        self._parts = parts
        self._sink = parts.sink
        self._entries = parts.entries
        self._stop = parts.stop
        self._trace = parts.trace
        options = parts.options
        deletions = Deletions(
            sync=options.sync,
            share=options.sync_max,
            rows_before=parts.rows_before,
            held=parts.last_run.held,
            possible=isinstance(parts.sink, Reads | Deletes),
        )
        self._ledger = RunLedger(
            parts.trace,
            parts.dead_letters,
            deletions=deletions,
            verify=options.verify,
            chunked=parts.chunker is not None,
        )
        self._counts = self._ledger.counts
        self._calls: deque[tuple[list[PlannedRecord], EmbeddingCall]] = deque()
        self._calls_ahead = calls_ahead
        self._requests = RetryingWriter(parts.options.retry or RetryPolicy(), parts.stop, self._ledger.retrying)
        self._writer = BatchWriter(parts.sink, self._requests, self._ledger, parts.entries)
        self._embedder = RecordEmbedder(
            parts.engine,
            parts.widths,
            sparse_engine=parts.sparse_engine,
            context=context_of(parts.chunker),
            trace=parts.trace,
            check=self._writer.check,
        )
        self._planner = RecordPlanner(parts, self._ledger, self._writer.check, self._requests)
        self._timer = PageTimer(self._write_all)
        self._keep = False

    def ingest(self, reader: RecordReader) -> IngestReport:
        """Write what the source yields; returns the counts."""
        cache = getattr(self._parts.engine, "cache", None)
        uncached = getattr(cache, "unwritten", 0)
        source = SourceItems(reader, self._stop, self._timer.turn)
        self._keep = reader.once  # a run that is stopped writes what it cannot read again
        progress = IngestProgress(
            self._counts.now,
            self._queues,
            show=self._parts.options.show_progress,
            trace=self._trace,
            total=reader.total,
            position=reader.position,
            computed=_computed(self._parts.engine),
        )
        with progress:
            self._embed_and_write(source)
            if source.error is not None:
                raise source.error
            stopped = self._stop.is_set()
            verification = None
            if not stopped:
                self._ledger.deletions.finish(
                    self._sink, self._requests, self._entries, self._counts, self._parts.last_run
                )
                if self._parts.options.verify and self._entries is not None and isinstance(self._sink, Reads):
                    sample = self._planner.sampled()
                    verification = verify(
                        self._sink, self._entries, sample, self._embedder, self._requests, self._ledger.expected
                    )
            self._parts.last_run.end(synced=self._ledger.deletions.synced)
            skipped = reader.skipped
            lost = 0 if cache is None else getattr(cache, "unwritten", 0) - uncached
            report = self._counts.report(
                skipped=0 if skipped is None else skipped.count,
                skipped_files=() if skipped is None else skipped.names,
                uncached=lost,
                cache_error=getattr(cache, "write_error", None) if lost else None,
                stopped=stopped,
                verification=verification,
            )
            progress.finish(report)
            return report

    def _embed_and_write(self, source: SourceItems) -> None:
        try:
            with self._timer:
                for item in source:
                    self._timer.note()
                    if self._planner.add(item):
                        self._plan_page()
                self._timer.check()
                if not self._leaves_out():
                    self._write_all()
            while self._calls:
                self._complete(*self._calls.popleft())
            self._writer.finish()
        except BaseException as error:
            for _, call in self._calls:
                call.cancel()
            self._writer.abandon()
            if not (isinstance(error, SinkUnavailableError) and self._stop.is_set()):
                raise
            logger.warning("stopped before everything was written, since %s", error)
        finally:
            self._counts.log_summary(self._parts.engine.spec.max_length)

    def _plan_page(self, *, rest: bool = False) -> None:
        """Submit the full batches of what was read, or all."""
        before = self._planner.planned
        for batch in self._planner.batches(rest=rest):
            self._parts.last_run.begin(self._parts.rows_before)
            self._calls.append((batch, self._submit(batch)))
            # The engine works on the later calls while the oldest is finished here.
            if len(self._calls) > self._calls_ahead:
                self._complete(*self._calls.popleft())
        if self._planner.planned > before or not (self._calls or self._planner.waiting):
            self._timer.restart(waiting=bool(self._calls))

    def _write_all(self) -> None:
        """Write all that was read."""
        self._plan_page(rest=True)
        while self._calls:
            self._complete(*self._calls.popleft())

    def _leaves_out(self) -> bool:
        """Whether the run leaves out what it has not written: it is stopped, and the source can be read again."""
        return self._stop.is_set() and not self._keep

    def _queues(self) -> dict[str, tuple[int, int]]:
        """What waits in each queue, and its limit."""
        return {"embed": (len(self._calls), self._calls_ahead), "write": (self._writer.queued, QUEUED_BATCHES)}

    def _submit(self, batch: list[PlannedRecord]) -> EmbeddingCall:
        return self._embedder.submit(batch)

    def _complete(self, batch: list[PlannedRecord], call: EmbeddingCall) -> None:
        if not self._finished(call):
            return
        for result in self._embedder.complete(call):
            if not isinstance(result, EmbeddedRecords):
                self._ledger.fail(result.record, result.reason)
                continue
            self._counts.truncated(result.truncated_ids)
            hits = sum(result.cached)
            self._counts.add(cached=hits, embedded=len(result.records) - hits)
            self._writer.put(result)

    def _finished(self, call: EmbeddingCall) -> bool:
        """Wait for a call, unless the run is stopped and the rows computed for it are in the cache."""
        kept = getattr(self._parts.engine, "cache", None) is not None
        with self._trace.stage("embed", len(call.records)):
            while not call.wait(_STOP_SECONDS):
                if kept and self._leaves_out():
                    call.cancel()
                    return False
        return True


def _computed(engine: Any) -> Callable[[], int]:
    """How many texts the engine has computed from now on; none by an object around one that does not count."""
    if not hasattr(engine, "stats"):
        return lambda: 0
    before = engine.stats().batch_texts
    return lambda: int(engine.stats().batch_texts - before)
