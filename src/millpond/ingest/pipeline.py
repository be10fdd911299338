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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from millpond import matryoshka
from millpond.blank import is_blank
from millpond.engine.schedule.truncation import TruncatedTexts
from millpond.errors import (
    CacheError,
    EngineClosedError,
    EngineOverloadedError,
    InvalidRequestError,
    MillpondError,
    ModelLoadError,
    UnsupportedTaskError,
)
from millpond.ingest.arguments import check_engine, check_records, check_sink
from millpond.ingest.batch import WriteBatch, storable
from millpond.ingest.counts import RunCounts
from millpond.ingest.record import Record, point_id
from millpond.ingest.report import IngestReport
from millpond.ingest.sink import Checks, Sink, check_widths
from millpond.ingest.sources import Rejected, SkippedFiles, read
from millpond.ingest.writer import BatchWriter
from millpond.outputs import EmbeddingOutput
from millpond.params import PoolingParams
from millpond.progress import draw_bar
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
    records: Iterable[Any] | str | os.PathLike[str],
    *,
    engine: Engine,
    sink: Sink,
    journal: str | os.PathLike[str] | None = None,
    resume: bool = True,
    show_progress: bool = True,
    keep_empty: bool = False,
) -> IngestReport:
    """Embed records and write them to a database.

    The engine embeds at full width with the role ``document``, and uses its cache if it has one. The vectors are cut
    to the sink's widths, normalized and written. Ids do not depend on the model and a write replaces rows with the same
    id, so a run can be repeated safely: with a cache it embeds no text twice.

    A line or item that holds no record, or that the engine cannot embed although it embeds others, is logged and
    counted as failed; the run goes on. A blank text (no visible character) has a vector without a meaning, which is
    near to many questions: it is left out and counted as empty, and a row that an earlier run wrote for its id is
    deleted. Texts that are cut to the engine's ``max_length`` are counted, and the log names the first of them once.

    An exception of the source ends the run: the records before it are written, then it is raised, with a note that
    tells after how many. Any other error of the engine or the database stops the run and is raised once the threads
    have ended; rows already written stay. The sink stays open.

    Args:
        records: A path, a table or an iterable of records, dicts or documents (it may be endless; it is read in this
            thread), as :func:`~millpond.ingest.read` takes them.
        engine: The engine to embed with.
        sink: The collection to write to.
        journal: Not available in this version; leave it None.
        resume: Continue from the journal; has no effect without one.
        show_progress: Draw a progress bar, if standard error is a terminal or this is a notebook.
        keep_empty: Embed blank texts too.

    Returns:
        The counts of the run.

    Raises:
        InvalidRequestError: The source, a width or an option is not valid; nothing was read.
        FingerprintMismatchError: The collection was built by another model; nothing was read.
        TypeError: ``engine`` is no Engine (but an AsyncEngine, or a name), ``sink`` no sink, or ``records`` no
            iterable; nothing was read.
    """
    check_engine(engine)
    check_sink(sink)
    check_records(records)
    if journal is not None:
        raise InvalidRequestError(
            f"journal={os.fspath(journal)!r}: journals are not available in this version; leave it None. "
            "Running again is safe without one, and an engine with a cache embeds nothing twice"
        )
    widths = check_model(engine.spec, getattr(sink, "dimensions", None))
    with ExitStack() as stack:
        items = stack.enter_context(closing(read(records)))
        sink.prepare(engine.spec)
        total = len(records) if isinstance(records, Sized) and not isinstance(records, str) else None
        bar = stack.enter_context(draw_bar(show=show_progress, total=total, unit=" records"))
        return _Run(engine, sink, widths, RunCounts(bar.update), keep_empty=keep_empty).ingest(items)


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


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Consecutive records of the source: those to embed, and the ids of those whose text is blank."""

    records: list[Record]
    blank_ids: list[str]


class _Source:
    """The items of a source, up to its end or its exception, which is kept for after the last write.

    Attributes:
        error: The exception, once it was raised.
        skipped: What a folder's reader did not read.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self._read = 0
        self.error: Exception | None = None
        self.skipped: SkippedFiles | None = None

    def __iter__(self) -> Iterator[Record | Rejected]:
        while True:
            try:
                item = next(self._items)
            except StopIteration as end:
                self.skipped = end.value if isinstance(end.value, SkippedFiles) else None
                return
            except Exception as error:
                error.add_note(f"ingest: raised by the source at item {self._read} (from 0); those before are written")
                self.error = error
                return
            yield item
            self._read += 1


class _Run:
    """One run from the source to the sink."""

    def __init__(self, engine: Engine, sink: Sink, widths: list[int], counts: RunCounts, *, keep_empty: bool) -> None:
        self._engine = engine
        self._check = sink.check if isinstance(sink, Checks) else None
        self._widths = widths
        self._counts = counts
        self._keep_empty = keep_empty
        self._writer = BatchWriter(sink, counts)
        self._failing_records = 0  # since the engine last embedded a record

    def ingest(self, items: Iterable[Any]) -> IngestReport:
        calls: deque[tuple[_Batch, Future[EmbeddingOutput] | None]] = deque()
        try:
            source = _Source(items)
            for batch in self._batches(source):
                calls.append((batch, self._submit(batch.records) if batch.records else None))
                # The engine works on the later calls while the oldest is finished here.
                if len(calls) > _CALLS_AHEAD:
                    self._complete(*calls.popleft())
            while calls:
                self._complete(*calls.popleft())
            self._writer.finish()
        except BaseException:
            for _, call in calls:
                if call is not None:
                    call.cancel()
            self._writer.abandon()
            raise
        finally:
            self._counts.log_summary(self._engine.spec.max_length)
        if source.error is not None:
            raise source.error
        skipped = source.skipped
        return self._counts.report() if skipped is None else self._counts.report(skipped.count, skipped.names)

    def _batches(self, items: Iterable[Record | Rejected]) -> Iterator[_Batch]:
        """Batches of the records that the sink accepts; of records with the same id in a batch, the last."""
        records: dict[str, Record] = {}
        blank_ids: dict[str, None] = {}
        chars = 0
        for item in items:
            self._writer.check()
            self._counts.add(read=1)
            if isinstance(item, Rejected):
                self._counts.failed(item.where, item.reason)
                continue
            blank = not self._keep_empty and is_blank(item.text)
            if self._check is not None and not blank:
                try:
                    self._check(item)
                except InvalidRequestError as error:
                    self._counts.failed(f"record {item.id!r}", str(error))
                    continue
            if item.id in records:
                chars -= len(records.pop(item.id).text)
                self._counts.add(duplicates=1)
            if blank:
                blank_ids[item.id] = None
                self._counts.empty(item.id)
            else:
                blank_ids.pop(item.id, None)
                records[item.id] = item
                chars += len(item.text)
            if len(records) + len(blank_ids) >= BATCH_RECORDS or chars >= BATCH_CHARS:
                yield _Batch(records=list(records.values()), blank_ids=list(blank_ids))
                records, blank_ids, chars = {}, {}, 0
        if records or blank_ids:
            yield _Batch(records=list(records.values()), blank_ids=list(blank_ids))

    def _complete(self, batch: _Batch, call: Future[EmbeddingOutput] | None) -> None:
        if batch.blank_ids:
            self._writer.delete(batch.blank_ids)
        if call is not None:
            self._finish(batch.records, call)

    def _submit(self, batch: list[Record]) -> Future[EmbeddingOutput]:
        texts = [record.text for record in batch]
        # Full width, not normalized: every other width is cut from it.
        params = PoolingParams(role="document", dimensions=self._engine.spec.dimensions, normalize=False)
        while True:
            try:
                with TruncatedTexts.quiet():  # the run reports the texts of all its calls
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
        cached, truncated = output.cached, output.truncated
        if not valid.all():
            for index in np.flatnonzero(~valid):
                self._counts.failed(f"record {records[index].id!r}", "its vector is not finite, or all zero")
            records = [record for record, keep in zip(records, valid, strict=True) if keep]
            vectors = {width: cut[valid] for width, cut in vectors.items()}
            cached, truncated = cached[valid], truncated[valid]
        self._counts.truncated(records[index].id for index in np.flatnonzero(truncated))
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
