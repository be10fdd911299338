"""watch: keeps a collection equal to a source that changes, until it is asked to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.errors import IndexLockedError, JournalError, SinkUnavailableError
from millpond.ingest.arguments import check_engine
from millpond.ingest.pipeline.deletions import DeletionsRefusedError, check_share
from millpond.ingest.pipeline.options import RunOptions
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sinks.protocol import Sink
from millpond.ingest.sources.files.file_records import MARK
from millpond.ingest.telemetry.report import IngestReport
from millpond.ingest.watch.collection import WatchedCollection
from millpond.ingest.watch.metrics import serving
from millpond.ingest.watch.source import Changes, Waker, WatchedSource
from millpond.ingest.watch.state import WatchReport, WatchState
from millpond.late_interaction.plaid.storage.lock import WriteLock
from millpond.support.blank import is_blank

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

logger = logging.getLogger(__name__)

# How long the watcher waits after an answer that did not come outside of a run, which has its own waits.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 20.0
# Deletions that are too many are counted again after so long.
_HELD_SECONDS = 60.0


class Watcher:
    """One watcher.

    Args:
        source: What is watched.
        collection: What is kept equal to it.
        grace: Seconds after which the rows of what is gone are deleted, if it has not come back.
        sync_max: The largest share of the collection's rows that may wait for their deletion.
        stop: Ends the watcher, and wakes it.
        state: Counts what is done.
    """

    def __init__(
        self,
        source: WatchedSource,
        collection: WatchedCollection,
        *,
        grace: float,
        sync_max: float,
        stop: Waker,
        state: WatchState,
    ) -> None:
        self._source, self._collection = source, collection
        self._grace, self._share = grace, sync_max
        self._stop, self._state = stop, state
        self._gone: dict[str, float] = {}  # ids, and when they may be deleted
        self._again = 0.0  # no deletion before this time, since the last ones were too many
        self._begun: float | None = time.monotonic()  # of the first pass

    def run(self) -> None:
        """Fill the collection, and then follow the source."""
        self._state.oldest = self._oldest
        self._source.start(self._stop.wake)
        try:
            report = self._fill()
            self._begun = None
            if report.stopped:
                return
            self._state.unanswered = False
            entries = self._collection.open()
            wait = _FIRST_WAIT
            while not self._stop.is_set():
                try:
                    changes = self._source.changes(entries)
                    if changes is not None:
                        self._take(changes)
                    self._delete()
                    self._state.unanswered = False
                    wait = _FIRST_WAIT
                    if changes is None:
                        self._collection.rest()
                        self._stop.wait_for(self._next())
                except SinkUnavailableError as error:
                    if self._stop.is_set():
                        return
                    self._state.unanswered = True
                    self._state.note_error(str(error))
                    logger.warning("%s; trying again in %.0f s", error, wait)
                    self._stop.wait_for(wait)
                    wait = min(2 * wait, _LONGEST_WAIT)
        finally:
            self._source.stop()

    def _fill(self) -> IngestReport:
        """The first pass. What seems to be gone may only be on its way: a file is empty while it is written anew."""
        rested = False
        while True:
            try:
                return self._collection.fill(self._source.full())
            except DeletionsRefusedError as error:
                if rested or self._stop.is_set():
                    raise
                self._state.note_error(str(error))
                logger.warning("%s; reading the source again when it changes, or after %g s", error, self._grace)
                rested = not self._stop.wait_for(self._grace)

    def _take(self, changes: Changes) -> None:
        """Write what changed, and note what is gone."""
        seen: set[str] = set()
        blank: set[str] = set()
        unread: set[str] = set()
        report = self._collection.write(_noting(changes.records, seen, blank, unread))
        if report.stopped:
            return
        deadline = time.monotonic() + self._grace
        for each in (*changes.gone(seen), *(blank - seen)):
            self._gone.setdefault(each, deadline)
        files = tuple(f"{path}{MARK}" for path in unread)  # that are back, and broken: their rows stay
        for each in [each for each in self._gone if each in seen or (files and each.startswith(files))]:
            del self._gone[each]
            self._again = 0.0
        changes.accept()
        self._state.waiting = len(self._gone)

    def _delete(self) -> None:
        """Delete the rows of what is gone for long enough, if all that is gone is not too much."""
        now = time.monotonic()
        due = [each for each, deadline in self._gone.items() if deadline <= now]
        if not self._gone:
            self._state.held = ""
        if not due or now < self._again:
            return
        if not self._source.is_there():
            self._again = now + _HELD_SECONDS
            return
        if self._share < 1:
            rows, total = self._collection.rows_of(self._gone), self._collection.count()
            if rows > self._share * total:
                self._hold(rows, total)
                return
        self._state.held = ""
        self._again = 0.0
        self._collection.delete(due)
        for each in due:
            self._gone.pop(each, None)
        self._state.waiting = len(self._gone)

    def _hold(self, rows: int, total: int) -> None:
        held = (
            f"{rows} of {total} rows would be deleted, and sync_max={self._share:g} allows {int(self._share * total)}; "
            "they stay until the source has their records again. If they are to go, start again with a larger sync_max"
        )
        if held != self._state.held:
            logger.error("%s", held)
            self._state.note_error(held)
        self._state.held = held
        self._again = time.monotonic() + _HELD_SECONDS

    def _next(self) -> float | None:
        """Seconds until there is something to do without a change; ``None``: there is nothing."""
        times = [] if (due := self._source.due()) is None else [due]
        if self._gone:
            times.append(max(self._again, min(self._gone.values())))
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _oldest(self) -> float | None:
        times = [each for each in (self._begun, self._source.oldest()) if each is not None]
        return min(times, default=None)


def watch(
    source: WatchedSource,
    *,
    engine: Engine,
    open_sink: Callable[[], Sink],
    options: RunOptions,
    grace: float = 10.0,
    metrics: tuple[str, int] | None = None,
    stop: Waker | None = None,
    sparse_engine: Engine | None = None,
    state: WatchState | None = None,
) -> WatchReport:
    """Keep a collection equal to a source, until ``stop`` is set.

    First the whole source is ingested, and rows of what it does not have are deleted, as by ``sync=True``. Then only
    what changes is read, embedded and written; rows of what is gone are deleted after ``grace`` seconds. A database
    that does not answer is waited for.

    Args:
        source: A FolderSource, a LinesSource or a TableSource.
        engine: The engine to embed with; with a cache, what was renamed is not embedded again.
        open_sink: Opens the collection.
        options: The options of a run; the journal is required.
        grace: Seconds between the disappearance of a record and the deletion of its rows.
        metrics: Host and port of ``/metrics`` and ``/health``.
        stop: Ends the watcher once it is set and woken.
        sparse_engine: The engine of a hybrid sink's sparse vectors, by default ``engine``.
        state: Counts what is done, if somebody else is to see it.

    Returns:
        The counts until the end.

    Raises:
        InvalidRequestError: The source, a width or an option is not valid.
        JournalError: Another watcher has the collection, or the journal cannot be used.
        SinkError: The database refuses a request, or the first pass would delete too much of a source that rests.
    """
    check_engine(engine)
    check_share(options.sync_max)
    stop = Waker() if stop is None else stop
    state = WatchState() if state is None else state
    with ExitStack() as stack:
        stack.callback(stop.close)
        stack.enter_context(serving(metrics, state))
        collection = WatchedCollection(engine, open_sink, options, stop, state, sparse_engine=sparse_engine)
        stack.callback(collection.close)
        assert options.journal is not None
        stack.enter_context(_alone(Path(options.journal), collection.target))
        Watcher(source, collection, grace=grace, sync_max=options.sync_max, stop=stop, state=state).run()
    return state.report()


def _noting(
    items: Iterator[Record | Rejected], seen: set[str], blank: set[str], unread: set[str]
) -> Iterator[Record | Rejected]:
    """The items without blank records: a file that an editor has just emptied is as one that is gone."""
    for item in items:
        if isinstance(item, Rejected):
            if item.record_id is not None:
                seen.add(item.record_id)
                unread |= {item.record_id} if item.parts else set()
        elif is_blank(item.text):
            seen.discard(item.id)
            blank.add(item.id)
            continue
        else:
            seen.add(item.id)
        yield item


@contextmanager
def _alone(journal: Path, target: str) -> Iterator[None]:
    """Hold the lock of a collection, in a file beside the journal."""
    name = blake2b(target.encode(errors="surrogateescape"), digest_size=4).hexdigest()
    lock = WriteLock(journal.with_name(f"{journal.name}.{name}.lock"))
    try:
        with lock.held(0):
            yield
    except IndexLockedError as error:
        raise JournalError(
            f"another process watches {target} with the journal {str(journal)!r}; end it, or wait for its end"
        ) from error
