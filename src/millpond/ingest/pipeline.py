"""ingest: reads, embeds and writes records at the same time, in bounded memory.

::

    source ──batches──► engine, two calls ahead ──vectors──► cut to each width ──queue of two──► writer thread ──► sink
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np

from millpond import matryoshka
from millpond.engine.progress import draw_bar
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
from millpond.ingest.counts import RunCounts
from millpond.ingest.record import Record, point_id
from millpond.ingest.report import IngestReport
from millpond.ingest.sink import Checks, Sink, check_widths
from millpond.ingest.sources import Rejected, read
from millpond.ingest.writer import BatchWriter
from millpond.outputs import EmbeddingOutput
from millpond.params import PoolingParams
from millpond.spec import ModelSpec

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

# One engine call: enough texts to pack full batches, few enough that the progress bar moves and memory stays flat.
BATCH_RECORDS = 2048
BATCH_CHARS = 2 << 20
_CALLS_AHEAD = 2
# Engine errors that do not depend on the texts.
_FATAL = (CacheError, EngineClosedError, InvalidRequestError, ModelLoadError)
# If more records in a row than this cannot be embedded, the engine is broken and not the records.
_MAX_FAILING_RECORDS = 16


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

    The engine embeds at full width with the role ``document``, and uses its cache if it has one. The vectors are cut
    to the sink's widths, normalized and written. Ids do not depend on the model and a write replaces rows with the same
    id, so a run can be repeated safely: with a cache it embeds no text twice.

    A line or record that cannot be stored, or that the engine cannot embed although it embeds others, is logged and
    counted as failed; the run goes on. Any other error of the source, the engine or the database stops the run and is
    raised here once the threads have ended; rows already written stay. The sink stays open.

    Args:
        records: Any iterable of records (it may be endless; it is read in this thread), or a path that
            :func:`~millpond.ingest.read` accepts.
        engine: The engine to embed with.
        sink: The collection to write to.
        journal: Not available in this version; leave it None.
        resume: Continue from the journal; has no effect without one.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Returns:
        The counts of the run.

    Raises:
        InvalidRequestError: The source, a width or an option is not valid; nothing was read.
        FingerprintMismatchError: The collection was built by another model; nothing was read.
        TypeError: The iterable yielded something other than a Record.
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
        bar = stack.enter_context(draw_bar(show=show_progress, total=total, unit=" records"))
        return _Run(engine, sink, widths, RunCounts(bar.update)).ingest(items)


def check_model(spec: ModelSpec, dimensions: Sequence[int] | None) -> list[int]:
    """The widths that a model writes, ascending.

    Raises:
        UnsupportedTaskError: The model does not embed.
        InvalidDimensionsError: The model's vectors cannot have these widths.
    """
    if "embed" not in spec.tasks:
        raise UnsupportedTaskError(
            f"{spec.name} does not embed (it serves {', '.join(sorted(spec.tasks))}); choose an embedding model"
        )
    return sorted({spec.check_dimensions(width) for width in check_widths(dimensions) or (None,)})


class _Run:
    """One run from the source to the sink."""

    def __init__(self, engine: Engine, sink: Sink, widths: list[int], counts: RunCounts) -> None:
        self._engine = engine
        self._check = sink.check if isinstance(sink, Checks) else None
        self._widths = widths
        self._counts = counts
        self._writer = BatchWriter(sink, counts)
        self._failing_records = 0  # since the engine last embedded a record

    def ingest(self, items: Iterable[Record | Rejected]) -> IngestReport:
        calls: deque[tuple[list[Record], Future[EmbeddingOutput]]] = deque()
        try:
            for batch in self._batches(items):
                calls.append((batch, self._submit(batch)))
                # The engine works on the later calls while the oldest is finished here.
                if len(calls) > _CALLS_AHEAD:
                    self._finish(*calls.popleft())
            while calls:
                self._finish(*calls.popleft())
            self._writer.finish()
        except BaseException:
            for _, call in calls:
                call.cancel()
            self._writer.abandon()
            raise
        return self._counts.report()

    def _batches(self, items: Iterable[Record | Rejected]) -> Iterator[list[Record]]:
        """Batches of the records that the sink accepts; of records with the same id in a batch, the last."""
        batch: dict[str, Record] = {}
        chars = 0
        for item in items:
            self._writer.check()
            self._counts.add(read=1)
            if isinstance(item, Rejected):
                self._counts.failed(item.where, item.reason)
                continue
            if not isinstance(item, Record):
                raise TypeError(f"records yielded a {type(item).__name__}; yield Record(id, text, metadata)")
            if self._check is not None:
                try:
                    self._check(item)
                except InvalidRequestError as error:
                    self._counts.failed(f"record {item.id!r}", str(error))
                    continue
            if item.id in batch:
                chars -= len(batch.pop(item.id).text)
                self._counts.add(duplicates=1)
            batch[item.id] = item
            chars += len(item.text)
            if len(batch) >= BATCH_RECORDS or chars >= BATCH_CHARS:
                yield list(batch.values())
                batch, chars = {}, 0
        if batch:
            yield list(batch.values())

    def _submit(self, batch: list[Record]) -> Future[EmbeddingOutput]:
        texts = [record.text for record in batch]
        # Full width, not normalized: every other width is cut from it.
        params = PoolingParams(role="document", dimensions=self._engine.spec.dimensions, normalize=False)
        while True:
            try:
                call: Future[EmbeddingOutput] = self._engine.submit("embed", texts, params)
                return call
            except EngineOverloadedError as error:  # other callers fill the queue; retry when they are served
                self._writer.check()
                time.sleep(error.retry_after)

    def _finish(self, records: list[Record], call: Future[EmbeddingOutput]) -> None:
        try:
            output = call.result()
        except _FATAL:
            raise
        except (MillpondError, RuntimeError) as error:  # caused by one text, or by the forward of its batch
            return self._isolate_failing_records(records, error)
        except BaseException:
            call.cancel()  # interrupted: nothing waits for the call any more
            raise
        if not output.cached.all():
            self._failing_records = 0
        rows = output.embeddings  # [n, d]
        vectors = {width: matryoshka.cut(rows, width, normalize=True) for width in self._widths}
        valid = np.logical_and.reduce([storable(cut) for cut in vectors.values()])  # [n]
        cached = output.cached
        if not valid.all():
            for index in np.flatnonzero(~valid):
                self._counts.failed(f"record {records[index].id!r}", "its vector is not finite, or all zero")
            records = [record for record, keep in zip(records, valid, strict=True) if keep]
            vectors = {width: cut[valid] for width, cut in vectors.items()}
            cached = cached[valid]
        hits = int(cached.sum())
        self._counts.add(cached=hits, embedded=len(records) - hits)
        if records:
            ids = [point_id(record.id) for record in records]
            self._writer.put(WriteBatch(records=records, ids=ids, vectors=vectors))

    def _isolate_failing_records(self, records: list[Record], error: Exception) -> None:
        """Embed a failed call's records again by halves: leave out those that fail alone, and write the others."""
        if len(records) > 1:
            middle = len(records) // 2
            for half in (records[:middle], records[middle:]):
                self._finish(half, self._submit(half))
            return
        self._failing_records += 1
        if self._failing_records > _MAX_FAILING_RECORDS:
            raise error
        self._counts.failed(f"record {records[0].id!r}", str(error) or repr(error))
