"""ingest: records are read, embedded and written at the same time, in bounded memory.

::

    source ──batches──► engine, two calls ahead ──rows──► cut to each width ──queue of two──► writer thread ──► sink
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from millpond import matryoshka
from millpond.errors import (
    CacheError,
    EngineClosedError,
    EngineOverloadedError,
    InvalidRequestError,
    MillpondError,
    ModelLoadError,
    UnsupportedTaskError,
)
from millpond.ingest.batch import WriteBatch, storable
from millpond.ingest.record import Record, point_id
from millpond.ingest.report import IngestReport
from millpond.ingest.sink import Checks, Sink, check_widths
from millpond.ingest.sources import Rejected, read
from millpond.outputs import EmbeddingOutput
from millpond.params import PoolingParams
from millpond.spec import ModelSpec

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

logger = logging.getLogger(__name__)

# One call of the engine: enough texts to pack full batches from, few enough that the bar moves and memory stays flat.
BATCH_RECORDS = 2048
BATCH_CHARS = 2 << 20
_CALLS_AHEAD = 2
_QUEUED_BATCHES = 2
# Rows of one write: between two of them a run can be stopped, and a write may take seconds.
_WRITE_RECORDS = 512
_LOUD_FAILURES = 1000
# Errors of the engine that no choice of texts avoids.
_FATAL = (CacheError, EngineClosedError, InvalidRequestError, ModelLoadError)
# After so many records in a row that it could not embed, it is the engine that is broken.
_MOST_CULPRITS = 16


def ingest(
    records: Iterable[Record | Rejected] | str | os.PathLike[str],
    *,
    engine: Engine,
    sink: Sink,
    journal: str | os.PathLike[str] | None = None,
    resume: bool = True,
    show_progress: bool = True,
) -> IngestReport:
    """Embed records and write them to a database.

    The engine embeds at full width with the role ``document`` (its cache, if it has one, is asked first and kept up to
    date); the rows are cut to the sink's widths, normalized and written. Ids do not depend on the model and writes
    replace, so running again is safe: with a cache it embeds nothing twice.

    A line or record that cannot be stored, or that the engine fails on though it embeds others, is logged, counted as
    failed, and does not stop the run. Any other error, of the source, the engine or the database, stops it and is
    raised here once the threads have ended; what was written stays written. The sink is left open.

    Args:
        records: Records, from any iterable (it may be endless; it is read in this thread), or the path of a source as
            :func:`~millpond.ingest.read` takes it.
        engine: The engine to embed with.
        sink: The collection to write to.
        journal: Not available in this version; leave it None.
        resume: Whether to go on from the journal; of no effect without one.
        show_progress: Draw a progress bar, if this is a terminal.

    Returns:
        What was done, in numbers that add up.

    Raises:
        InvalidRequestError: A source, width or option that cannot be used; nothing was read.
        FingerprintMismatchError: The collection was built by another model; nothing was read.
        TypeError: The iterable yielded something else than a Record.
    """
    if journal is not None:
        raise InvalidRequestError(
            f"journal={os.fspath(journal)!r}: journals are not available in this version; leave it None. "
            "Running again is safe without one, and an engine with a cache embeds nothing twice"
        )
    widths = check_model(engine.spec, getattr(sink, "dimensions", None))
    with ExitStack() as stack:
        items = stack.enter_context(closing(read(records))) if isinstance(records, str | os.PathLike) else iter(records)
        sink.prepare(engine.spec)
        total = len(records) if isinstance(records, Sized) and not isinstance(records, str) else None
        # disable=None: no bar where there is no terminal
        bar = stack.enter_context(tqdm(total=total, unit=" records", disable=None if show_progress else True))
        run = _Run(engine, sink, widths, _Tally(bar.update))
        return run.over(items)


def check_model(spec: ModelSpec, dimensions: Sequence[int] | None) -> list[int]:
    """The widths that a model would write, ascending.

    Raises:
        UnsupportedTaskError: It does not embed.
        InvalidDimensionsError: It has no vectors of these widths.
    """
    if "embed" not in spec.tasks:
        raise UnsupportedTaskError(
            f"{spec.name} does not embed (it serves {', '.join(sorted(spec.tasks))}); choose an embedding model"
        )
    return sorted({spec.check_dimensions(width) for width in check_widths(dimensions) or (None,)})


class _Tally:
    """The counts of a run, kept by the reading thread and the writing one."""

    def __init__(self, advance: Callable[[int], object]) -> None:
        self._advance = advance
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("read", "cached", "embedded", "failed", "duplicates", "written"), 0)
        self._start = time.perf_counter()

    def add(self, **counts: int) -> None:
        """Add to the counts; the bar moves with the records that are settled."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
            if settled := sum(counts.get(name, 0) for name in ("written", "failed", "duplicates")):
                self._advance(settled)

    def failed(self, where: str, reason: str) -> None:
        """Count and log what is left out."""
        number = self._counts["failed"]
        # A file of another kind altogether fails on every line: enough of them shows that.
        logger.log(logging.WARNING if number < _LOUD_FAILURES else logging.DEBUG, "left out %s: %s", where, reason)
        if number == _LOUD_FAILURES:
            logger.warning("more than %d records were left out; the rest is logged at DEBUG", _LOUD_FAILURES)
        self.add(failed=1)

    def report(self) -> IngestReport:
        return IngestReport(**self._counts, seconds=time.perf_counter() - self._start)


class _Writer:
    """A thread that writes batches behind a bounded queue. After a failure it empties the queue, so nobody waits."""

    def __init__(self, sink: Sink, tally: _Tally) -> None:
        self._sink = sink
        self._tally = tally
        self._queue: queue.Queue[WriteBatch | None] = queue.Queue(_QUEUED_BATCHES)
        self._failure: BaseException | None = None
        self._dropping = False
        # A daemon, so that a database that never answers cannot keep the program from ending.
        self._thread = threading.Thread(target=self._work, name="millpond-writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what stopped the writing, if anything did."""
        if self._failure is not None:
            raise self._failure

    def put(self, batch: WriteBatch) -> None:
        """Queue a batch; waits while the queue is full."""
        self.check()
        self._queue.put(batch)

    def finish(self) -> None:
        """Wait until everything queued is written."""
        self._queue.put(None)
        self._thread.join()
        self.check()

    def abandon(self) -> None:
        """Drop what is queued and wait for the write under way."""
        self._dropping = True
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self._dropping or self._failure is not None:
                continue
            try:
                for part in _parts(batch):
                    if self._dropping:
                        break
                    self._sink.write(part)
                    self._tally.add(written=len(part))
            except BaseException as error:  # handed to the caller's thread, whatever it is
                self._failure = error


def _parts(batch: WriteBatch) -> Iterator[WriteBatch]:
    for start in range(0, len(batch), _WRITE_RECORDS):
        yield batch.part(slice(start, start + _WRITE_RECORDS))


class _Run:
    """One walk from the source to the sink."""

    def __init__(self, engine: Engine, sink: Sink, widths: list[int], tally: _Tally) -> None:
        self._engine = engine
        self._check = sink.check if isinstance(sink, Checks) else None
        self._widths = widths
        self._tally = tally
        self._writer = _Writer(sink, tally)
        self._culprits = 0  # since the engine last embedded anything

    def over(self, items: Iterable[Record | Rejected]) -> IngestReport:
        calls: deque[tuple[list[Record], Future[EmbeddingOutput]]] = deque()
        try:
            for batch in self._batches(items):
                calls.append((batch, self._submit(batch)))
                # The oldest call is settled while the engine works on the ones behind it.
                if len(calls) > _CALLS_AHEAD:
                    self._settle(*calls.popleft())
            while calls:
                self._settle(*calls.popleft())
            self._writer.finish()
        except BaseException:
            for _, call in calls:
                call.cancel()
            self._writer.abandon()
            raise
        return self._tally.report()

    def _batches(self, items: Iterable[Record | Rejected]) -> Iterator[list[Record]]:
        """Records worth embedding, some thousands at a time; of those with one id, the last."""
        batch: dict[str, Record] = {}
        chars = 0
        for item in items:
            self._writer.check()
            self._tally.add(read=1)
            if isinstance(item, Rejected):
                self._tally.failed(item.where, item.reason)
                continue
            if not isinstance(item, Record):
                raise TypeError(f"records yielded a {type(item).__name__}; yield Record(id, text, metadata)")
            if self._check is not None:
                try:
                    self._check(item)
                except InvalidRequestError as error:
                    self._tally.failed(f"record {item.id!r}", str(error))
                    continue
            if item.id in batch:
                chars -= len(batch.pop(item.id).text)
                self._tally.add(duplicates=1)
            batch[item.id] = item
            chars += len(item.text)
            if len(batch) >= BATCH_RECORDS or chars >= BATCH_CHARS:
                yield list(batch.values())
                batch, chars = {}, 0
        if batch:
            yield list(batch.values())

    def _submit(self, batch: list[Record]) -> Future[EmbeddingOutput]:
        texts = [record.text for record in batch]
        # Full width, as it comes: the one row of which every width is cut.
        params = PoolingParams(role="document", dimensions=self._engine.spec.dimensions, normalize=False)
        while True:
            try:
                call: Future[EmbeddingOutput] = self._engine.submit("embed", texts, params)
                return call
            except EngineOverloadedError as error:  # other callers fill the queue; theirs is answered, then ours
                self._writer.check()
                time.sleep(error.retry_after)

    def _settle(self, records: list[Record], call: Future[EmbeddingOutput]) -> None:
        try:
            output = call.result()
        except _FATAL:
            raise
        except (MillpondError, RuntimeError) as error:  # one text's, or the forward's that it was in
            return self._without_culprits(records, error)
        except BaseException:
            call.cancel()  # interrupted: nobody waits for it any more
            raise
        if not output.cached.all():
            self._culprits = 0
        rows = output.embeddings  # [n, d]
        vectors = {width: matryoshka.cut(rows, width, normalize=True) for width in self._widths}
        good = np.logical_and.reduce([storable(cut) for cut in vectors.values()])  # [n]
        cached = output.cached
        if not good.all():
            for index in np.flatnonzero(~good):
                self._tally.failed(f"record {records[index].id!r}", "its vector is not finite, or all zero")
            records = [record for record, keep in zip(records, good, strict=True) if keep]
            vectors = {width: cut[good] for width, cut in vectors.items()}
            cached = cached[good]
        hits = int(cached.sum())
        self._tally.add(cached=hits, embedded=len(records) - hits)
        if records:
            ids = [point_id(record.id) for record in records]
            self._writer.put(WriteBatch(records=records, ids=ids, vectors=vectors))

    def _without_culprits(self, records: list[Record], error: Exception) -> None:
        """Of a failed call's records, leave out those that it fails on even alone, and write the others."""
        if len(records) > 1:
            middle = len(records) // 2
            for half in (records[:middle], records[middle:]):
                self._settle(half, self._submit(half))
            return
        self._culprits += 1
        if self._culprits > _MOST_CULPRITS:
            raise error
        self._tally.failed(f"record {records[0].id!r}", str(error) or repr(error))
