"""ingest: reads, embeds and writes records at the same time, in bounded memory."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from millpond.errors import InvalidRequestError
from millpond.ingest.arguments import check_embeds, check_engine, check_sink
from millpond.ingest.chunking import Chunking
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.deletions import check_share
from millpond.ingest.pipeline.delivery import RetryPolicy
from millpond.ingest.pipeline.journal import Journal
from millpond.ingest.pipeline.last_run import LastRun
from millpond.ingest.pipeline.options import RunOptions, RunParts, Splitter, chunk_form
from millpond.ingest.pipeline.run import IngestRun
from millpond.ingest.pipeline.source_items import StopRequest
from millpond.ingest.pipeline.verify import forget_missing
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.protocol import Reads, Sink, check_widths
from millpond.ingest.sinks.run_note import RunNote
from millpond.ingest.sources.read import reader_for
from millpond.ingest.telemetry.report import IngestReport
from millpond.ingest.telemetry.trace import RunTrace
from millpond.values.spec import ModelSpec

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

logger = logging.getLogger(__name__)


def ingest(
    records: Iterable[Any] | str | os.PathLike[str],
    *,
    engine: Engine,
    sink: Sink,
    journal: str | os.PathLike[str] | None = None,
    resume: bool = True,
    show_progress: bool = True,
    keep_blank: bool = False,
    dead_letters: str | os.PathLike[str] | DeadLetterFile | None = None,
    chunking: Chunking | Splitter | None = None,
    sparse_engine: Engine | None = None,
    sync: bool = False,
    sync_max: float = 0.5,
    verify: bool = False,
    retry: RetryPolicy | None = None,
    stop: threading.Event | None = None,
    trace: RunTrace | None = None,
) -> IngestReport:
    """Embed records and write them to a database.

    The engine embeds at full width with the role ``document``, and uses its cache if it has one. The vectors are cut
    to the sink's widths, normalized and written. Ids do not depend on the model and a write replaces rows with the same
    id, so a run can be repeated safely: with a cache it embeds no text twice, with a journal it writes no row twice.

    What holds no record, cannot be embedded or is refused by the database is logged, counted as failed and kept as a
    dead letter; the run goes on. Blank texts are left out and counted, and rows that an earlier run wrote for their ids
    are deleted at the end. All rows that a run deletes are counted before the first one goes: if they are more than
    ``sync_max`` allows, or no record of the source was stored or is unchanged, every row stays and SinkError is raised.

    An exception of the source ends the run: the records before it are written, then it is raised, with a note that
    tells after how many. Any other error of the engine, the database or the journal stops the run and is raised once
    the threads have ended; rows already written stay. The sink stays open.

    Args:
        records: A path, a table or an iterable of records, dicts or documents (it may be endless; it is read in this
            thread), as :func:`~millpond.ingest.read` takes them.
        engine: The engine to embed with.
        sink: The collection to write to.
        journal: A file that notes which records are written, so that a run that was stopped or killed goes on where it
            was. It is created if it does not exist, and may serve several collections.
        resume: Leave out the records that the journal knows as written, unless their text or metadata has changed;
            ``False`` writes all of them again.
        show_progress: Draw a progress bar, if standard error is a terminal or this is a notebook.
        keep_blank: Embed blank texts too.
        dead_letters: A file for the records that are left out, which is a source itself; by default the journal's name
            with ``.dead.jsonl``, beside it; none without a journal. If it is the source, it is replaced at the end.
        chunking: Cut the texts that are longer than the model reads, or than this says, into chunks: each is a row. An
            object with ``split`` and ``settings`` cuts them in its own way.
        sparse_engine: The engine of a hybrid sink's sparse vectors, by default ``engine``.
        sync: Delete the rows of records that the source no longer has, after it was read to its end.
        sync_max: The largest share of the rows that the collection held before that a run may delete, from 0 to 1,
            with or without ``sync``; 1 for all.
        verify: After the run, look for every row, and compare the texts and vectors of a sample.
        retry: How long to wait for a database that does not answer.
        stop: Once it is set, the run reads no more, writes what is embedded, and returns.
        trace: Collects times and counts of the run.

    Returns:
        The counts of the run.

    Raises:
        InvalidRequestError: The source, a width or an option is not valid; nothing was read.
        FingerprintMismatchError: The collection was built by another model; nothing was read.
        JournalError: The journal cannot be read or written.
        SinkError: The database refuses or does not answer, or more rows would be deleted than ``sync_max`` allows.
        TypeError: ``engine`` is no Engine (but an AsyncEngine, or a name), ``sink`` no sink, or ``records`` no
            iterable; nothing was read.
    """
    options = RunOptions(
        journal=journal,
        resume=resume,
        show_progress=show_progress,
        keep_blank=keep_blank,
        dead_letters=dead_letters,
        chunking=chunking,
        sync=sync,
        sync_max=sync_max,
        verify=verify,
        retry=retry,
        stop=stop,
        trace=trace,
    )
    return run_ingest(records, engine=engine, sink=sink, sparse_engine=sparse_engine, options=options)


def run_ingest(
    records: object,
    *,
    engine: Engine,
    sink: Sink,
    sparse_engine: Engine | None,
    options: RunOptions,
    runner: Callable[[RunParts], IngestRun] = IngestRun,
) -> IngestReport:
    """Open the source and the files of a run, plan it, and run it: see :func:`ingest`."""
    check_engine(engine)
    check_sink(sink)
    check_share(options.sync_max)
    if sparse_engine is not None:
        check_engine(sparse_engine)
    for name in ("sync", "verify"):
        if getattr(options, name) and not isinstance(sink, Reads):
            raise InvalidRequestError(f"{name}=True needs a sink whose rows can be read; leave {name} out")
    widths = check_model(engine.spec, getattr(sink, "dimensions", None))
    chunker = options.chunker(engine)
    with ExitStack() as stack:
        reader = stack.enter_context(closing(reader_for(records)))
        journal, dead_letters = _open_files(stack, options, records)
        sparse = prepare_sink(sink, engine, sparse_engine, form=chunk_form(chunker))
        if isinstance(sink, CollectionSink) and sink.manifest is not None:
            widths = list(sink.manifest.dimensions)
        entries = None if journal is None else journal.collection(journal_name(sink, engine.spec))
        note = RunNote.now("ingest", reader.name, chunking="" if chunker is None else chunker.settings)
        last_run = LastRun(sink, entries, sync=options.sync, note=note)
        last_run.compare()
        if entries is not None and options.resume and isinstance(sink, Reads):
            forget_missing(sink, entries)
        run = runner(
            RunParts(
                options=options,
                engine=engine,
                sparse_engine=sparse,
                sink=sink,
                widths=widths,
                entries=entries,
                last_run=last_run,
                dead_letters=dead_letters,
                chunker=chunker,
                rows_before=sink.count() if isinstance(sink, Reads) else None,
                stop=StopRequest() if options.stop is None else options.stop,
                trace=RunTrace(vectors=0) if options.trace is None else options.trace,
            )
        )
        complete = False
        try:
            report = run.ingest(reader)
            complete = not report.stopped
            return report
        finally:
            if dead_letters is not None:
                dead_letters.close(complete=complete)


def _open_files(stack: ExitStack, options: RunOptions, source: object) -> tuple[Journal | None, DeadLetterFile | None]:
    """The journal, and the file of the dead letters."""
    path, letters = options.journal, options.dead_letters
    if path is None and options.verify:
        path = os.path.join(stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-")), "journal")
    elif letters is None and path is not None:
        letters = f"{os.fspath(path)}.dead.jsonl"
    journal = None if path is None else stack.enter_context(Journal(path))
    file = letters if isinstance(letters, DeadLetterFile | None) else DeadLetterFile(letters, source=source)
    if file is not None and journal is not None and file.path == journal.path:
        raise InvalidRequestError(
            f"dead_letters={str(file.path)!r} is the journal; name another file, or leave dead_letters out"
        )
    if file is not None and options.sync and file.replaces:
        raise InvalidRequestError(
            f"sync=True would delete every row but those of the dead letters in {str(file.path)!r}; leave sync out"
        )
    return journal, file


def check_model(spec: ModelSpec, dimensions: Sequence[int] | None) -> list[int]:
    """The widths that a model writes, ascending."""
    check_embeds(spec)
    return sorted({spec.check_dimensions(width) for width in check_widths(dimensions) or (None,)})


def prepare_sink(sink: Sink, engine: Engine, sparse_engine: Engine | None, *, form: Mapping[str, Any]) -> Engine | None:
    """Open the collection, for rows of a :func:`chunk_form`; returns the engine of the sparse vectors it stores."""
    options = dict(form)
    if getattr(sink, "hybrid", False):
        sparse_engine = engine if sparse_engine is None else sparse_engine
        options["sparse"] = sparse_engine.spec
    elif sparse_engine is not None:
        raise InvalidRequestError(
            "sparse_engine has no use, since the sink stores no sparse vectors; leave sparse_engine out, or make the "
            "sink with hybrid=True"
        )
    sink.prepare(engine.spec, **options)
    return sparse_engine


def journal_name(sink: Sink, spec: ModelSpec) -> str:
    """How a journal names what a model fills: where it is, and the model."""
    return f"{_target(sink)} {spec.fingerprint}"


def _target(sink: Sink) -> str:
    """The collection, as the journal names it."""
    target = getattr(sink, "target", None)
    if target is None:
        kind = type(sink)
        target = f"{kind.__module__}.{kind.__qualname__}"
        logger.warning(
            "the sink has no attribute target, so the journal knows its collection by the class %s alone; use the "
            "journal for this collection only",
            target,
        )
    return str(target)
