"""WatchedCollection: the collection of a watcher, open between its passes, and what a pass does to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.delivery import RetryingWriter, RetryPolicy
from millpond.ingest.pipeline.ingest import check_model, journal_name, prepare_sink, run_ingest
from millpond.ingest.pipeline.journal import CollectionEntries, Journal
from millpond.ingest.pipeline.last_run import LastRun
from millpond.ingest.pipeline.options import RunOptions, RunParts, Splitter, chunk_form
from millpond.ingest.pipeline.run import IngestRun
from millpond.ingest.pipeline.source_items import StopRequest
from millpond.ingest.record import Record, Rejected, point_id
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.protocol import ChunkedRows, Reads, Sink
from millpond.ingest.sources.read import RecordReader
from millpond.ingest.telemetry.report import IngestReport
from millpond.ingest.watch.state import WatchState, WatchTrace

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

logger = logging.getLogger(__name__)

# Each of them leaves a file or a version in some databases, which clean up when they are closed.
_PASSES_PER_SINK = 500
_IDS = 256


class _SessionRun(LastRun):
    """The passes of a watcher are one run: it begins with the first change, and ends with the watcher."""

    def end(self, *, synced: bool) -> None:
        """Nothing, at the end of a pass."""

    def close(self) -> None:
        """At the end of the watcher."""
        super().end(synced=False)


class WatchedCollection:
    """A collection, with the journal that says what it holds.

    Args:
        engine: The engine.
        open_sink: Opens the collection; called again from time to time.
        options: The options of a run, with a journal.
        stop: Ends a pass.
        state: Counts what is done.
        sparse_engine: The engine of the sparse vectors.
    """

    def __init__(
        self,
        engine: Engine,
        open_sink: Callable[[], Sink],
        options: RunOptions,
        stop: StopRequest,
        state: WatchState,
        *,
        sparse_engine: Engine | None = None,
    ) -> None:
        assert options.journal is not None
        self._engine, self._open_sink, self._sparse_given = engine, open_sink, sparse_engine
        self._options, self._stop, self._state = options, stop, state
        self._trace = WatchTrace(state)
        letters = options.dead_letters
        self._letters = (
            letters
            if isinstance(letters, DeadLetterFile)
            else DeadLetterFile(f"{options.journal}.dead.jsonl" if letters is None else letters)
        )
        self._requests = RetryingWriter(options.retry or RetryPolicy(), stop, self._note_retry)
        self._journal: Journal | None = None
        self._passes = 0
        self._closed = False
        self._sink: Sink = open_sink()

    @property
    def target(self) -> str:
        """The collection, as the journal names it."""
        return journal_name(self._sink, self._engine.spec).rpartition(" ")[0]

    def fill(self, reader: RecordReader) -> IngestReport:
        """The first pass: all that the source has, and no row that it has not."""
        if not isinstance(self._sink, Reads):
            raise InvalidRequestError("a collection is watched by a sink whose rows can be read; this one only writes")
        options = {**vars(self._options), "sync": True, "stop": self._stop, "trace": self._trace}
        report = run_ingest(
            reader,
            engine=self._engine,
            sink=self._sink,
            sparse_engine=self._sparse_given,
            options=RunOptions(**{**options, "dead_letters": self._letters}),
        )
        self._count(report)
        self._state.add(deleted=report.deleted)
        return report

    def open(self) -> CollectionEntries:
        """Open the journal, for the passes after the first one; returns its entries."""
        assert self._options.journal is not None
        self._journal = Journal(self._options.journal)
        self._prepare()
        return self._entries

    def _prepare(self) -> None:
        assert self._journal is not None
        self._chunker: Splitter | None = self._options.chunker(self._engine)
        self._sparse = prepare_sink(self._sink, self._engine, self._sparse_given, form=chunk_form(self._chunker))
        self._widths = check_model(self._engine.spec, getattr(self._sink, "dimensions", None))
        if isinstance(self._sink, CollectionSink) and self._sink.manifest is not None:
            self._widths = list(self._sink.manifest.dimensions)
        self._entries = self._journal.collection(journal_name(self._sink, self._engine.spec))
        self._run = _SessionRun(self._sink, self._entries)
        self._run.compare()

    def write(self, records: Iterator[Record | Rejected]) -> IngestReport:
        """Write what changed of some records; no other row is touched."""
        self._open_again()
        self._passes += 1
        parts = RunParts(
            options=RunOptions(**{**vars(self._options), "show_progress": False}),
            engine=self._engine,
            sparse_engine=self._sparse,
            sink=self._sink,
            widths=self._widths,
            entries=self._entries,
            last_run=self._run,
            dead_letters=self._letters,
            chunker=self._chunker,
            rows_before=1,  # not empty: the rows of a record that the journal does not know are looked for
            stop=self._stop,
            trace=self._trace,
        )
        report = IngestRun(parts).ingest(RecordReader(records))
        self._count(report)
        return report

    def rows_of(self, ids: Iterable[str]) -> int:
        """How many rows some records have, as far as the journal knows."""
        total, remaining = 0, iter(ids)
        while page := list(islice(remaining, _IDS)):
            total += sum(entry.chunks for entry in self._entries.find(page).values())
        return total

    def count(self) -> int:
        """How many rows the collection holds."""
        self._open_again()
        assert isinstance(self._sink, Reads)
        return self._requests.send(self._sink.count)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete the rows of records; returns how many there were."""
        self._open_again()
        self._passes += 1
        sink, deleted = self._sink, 0
        assert isinstance(sink, Reads)
        for start in range(0, len(ids), _IDS):
            page = ids[start : start + _IDS]
            owners = {point_id(each): each for each in page}
            rows = list(self._requests.send(partial(sink.fetch, list(owners))))
            if isinstance(sink, ChunkedRows):  # the last ones first, so that an interrupted deletion leaves no gap
                rows = [*self._requests.send(partial(sink.chunks_from, dict.fromkeys(page, 1))), *rows]
            if rows:
                self._run.begin()
                # First: of an entry without its row nobody would write the row again. Rows without an entry are found
                # when the watcher starts.
                self._entries.remove(page)
                self._requests.send(partial(sink.delete_rows, rows))
                deleted += len(rows)
            else:
                self._entries.remove(page)
        self._state.add(deleted=deleted)
        return deleted

    def rest(self) -> None:
        """Nothing waits: after many passes, close the collection and open it again, so that the database cleans up."""
        if self._passes >= _PASSES_PER_SINK:
            self._passes = 0
            self._run.close()
            self._closed = True
            self._sink.close()
            self._open_again()

    def _open_again(self) -> None:
        """Open the collection if it is closed: the database may not have answered when it was to be opened again."""
        if self._closed:
            self._sink = self._open_sink()
            try:
                self._prepare()
            except BaseException:
                self._sink.close()
                raise
            self._closed = False

    def close(self) -> None:
        """Note the end, and close everything."""
        try:
            if self._journal is not None and not self._closed:
                self._run.close()
        except SinkError as error:
            logger.warning("the end of the watcher could not be noted in the collection: %s", error)
        finally:
            if self._journal is not None:
                self._journal.close()
            self._letters.close()
            self._sink.close()

    def _count(self, report: IngestReport) -> None:
        self._state.add(passes=1, written=report.written, embedded=report.embedded)

    def _note_retry(self, error: BaseException, seconds: float) -> None:
        self._trace.note_retry(str(error))
        logger.warning("%s; trying again in %.1f s", error, seconds)
