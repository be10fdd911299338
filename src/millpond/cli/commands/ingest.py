"""``millpond ingest``: embed records and write them to a vector database."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.groups import (
    DeletionLimit,
    EngineOptions,
    RecordOptions,
    SinkOptions,
    SyncOptions,
    grouped,
    open_cache,
)
from millpond.cli.arguments.options import option
from millpond.cli.arguments.stop_signals import StopSignals, stop_signals
from millpond.cli.arguments.written import writing
from millpond.errors import InvalidRequestError, JournalError, MillpondError, SinkError
from millpond.ingest.record import Record, Rejected

if TYPE_CHECKING:
    from millpond.cache.vector_cache import VectorCache
    from millpond.ingest.chunking import Chunking
    from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
    from millpond.ingest.telemetry.report import IngestReport
    from millpond.ingest.telemetry.trace import RunTrace
    from millpond.values.spec import ModelSpec

Start = Callable[..., "IngestReport"]


@dataclass(frozen=True, kw_only=True)
class CollectionOptions(SinkOptions):
    """The collection, and what it stores."""

    to: str = option(
        MISSING,
        "URL of the collection, {sinks}. Keys are read from environment variables, which millpond env lists.",
        "URL",
    )
    dimensions: options.Widths = None
    fields: options.Fields = None
    sparse_model: options.SparseModel = None

    @property
    def widths(self) -> list[int] | None:
        """The widths to store."""
        return options.read_widths(self.dimensions)


def metadata_option() -> Any:
    """The field for the metadata of a record."""
    words = "Keys or columns to store as metadata; '' for none (default: all)."
    return option(None, words, "COLUMN,...", flags="--metadata")


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(RecordOptions):
    """How a source of records is read."""

    metadata_columns: str | None = metadata_option()

    def records(self, source: str) -> Iterator[Record | Rejected]:
        """The records of a source."""
        names = None if self.metadata_columns is None else [name for name in self.metadata_columns.split(",") if name]
        return self.read(source, metadata_columns=names)


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """How long texts are cut; the last two are fields of :class:`millpond.ingest.Chunking`."""

    chunk: bool = option(
        False, "Cut texts that are longer than the model reads into chunks, a row each.", flags="--chunk"
    )
    max_tokens: int | None = option(
        None, "Cut texts into chunks of at most so many tokens.", "N", flags="--chunk-tokens", min=1
    )
    overlap: float | None = option(
        None,
        "Share of a chunk that the next one repeats, or from 1 on a number of tokens.",
        "N",
        flags="--chunk-overlap",
        min=0.0,
        show_default="0.1",
    )

    @property
    def chunking(self) -> Chunking | None:
        """How ``ingest`` cuts."""
        if not self.chunk and self.max_tokens is None and self.overlap is None:
            return None
        from millpond.ingest.chunking import Chunking

        if self.overlap is None:
            return Chunking(max_tokens=self.max_tokens)
        whole = self.overlap >= 1 and self.overlap.is_integer()
        return Chunking(max_tokens=self.max_tokens, overlap=int(self.overlap) if whole else self.overlap)


@dataclass(frozen=True, kw_only=True)
class DocumentChunkOptions(ChunkOptions):
    """How long texts are cut, where whole documents are read."""

    context: Literal["late"] | None = option(
        None,
        "Pool each chunk's vector from the states of its whole document, of a model with mean pooling (late); needs "
        "--chunk-tokens.",
        flags="--chunk-context",
    )

    @property
    def chunking(self) -> Chunking | None:
        """How ``ingest`` cuts."""
        cut = super().chunking
        if self.context is None:
            return cut
        from millpond.ingest.chunking import Chunking

        return Chunking(max_tokens=self.max_tokens, overlap=0.1 if cut is None else cut.overlap, context=self.context)


@dataclass(frozen=True, kw_only=True)
class StateOptions(DeletionLimit):
    """The files of a run, and what it may delete."""

    cache: options.Cache = None
    journal: Path | None = option(
        None,
        "File that notes what is written, so that the same command goes on where a run was stopped or killed "
        "(default: the cache's name with .journal).",
        "PATH",
    )
    dead_letters: options.DeadLetters = None


@dataclass(frozen=True, kw_only=True)
class RunOptions(StateOptions, SyncOptions):
    """What the run leaves out, keeps and does at its end."""

    resume: bool = option(True, "Leave out what the journal knows as written.", flags="--resume/--no-resume")
    keep_blank: bool = option(False, "Store records without a visible character too.", flags="--keep-blank")
    verify: bool = option(False, "Then look for every row, and compare the vectors of a sample.", flags="--verify")
    report: options.Report = None
    retry_for: float = option(120.0, "Seconds to wait for a database that does not answer.", "SECONDS", min=0.0)

    def arguments(self, source: str) -> dict[str, Any]:
        """The arguments of ``ingest``; the journal is opened, so that an error names it before there is a database."""
        from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
        from millpond.ingest.pipeline.delivery import RetryPolicy
        from millpond.ingest.pipeline.journal import Journal

        journal, letters = self.journal, self.dead_letters
        if journal is None and self.cache is not None:
            journal = Path(f"{self.cache}.journal")
        if letters is None and journal is not None:
            try:
                Journal(journal).close()
            except JournalError as error:
                raise InvalidRequestError(str(error)) from error
            letters = Path(f"{journal}.dead.jsonl")
        return {
            **{name: getattr(self, name) for name in ("resume", "keep_blank", "sync", "sync_max", "verify")},
            "journal": journal,
            # It knows the source: a file of dead letters may be read and written in one run.
            "dead_letters": None if letters is None else DeadLetterFile(letters, source=source),
            "retry": RetryPolicy(give_up_after=self.retry_for),
        }


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The cluster that embeds; the arguments of :func:`millpond.ingest.ray.ingest_dataset`."""

    address: str | None = option(
        None,
        "Embed on a Ray cluster: local (this machine), auto (a cluster that runs here), ray://host:10001.",
        "ADDRESS",
        flags="--ray",
    )
    workers: int | None = option(
        None, "Workers of the cluster (default: as many as fit).", "N", flags="--ray-workers", min=1
    )
    num_cpus: float = option(1.0, "CPU cores of each worker.", "N", flags="--ray-cpus", min=0.0)
    num_gpus: float = option(0.0, "GPUs of each worker; 0.25 puts four on a GPU.", "N", flags="--ray-gpus", min=0.0)

    def check(self) -> None:
        """Refuse the options of a cluster without one."""
        if self.address is None and self != RayOptions():
            raise typer.BadParameter("--ray-workers, --ray-cpus and --ray-gpus require --ray")


@grouped
def ingest(
    source: options.RecordSource,
    *,
    model: options.Model,
    collection: CollectionOptions,
    columns: ColumnOptions,
    chunks: DocumentChunkOptions,
    run: RunOptions,
    ray: RayOptions,
    engine: EngineOptions,
) -> None:
    """Embed records, write them to a database with their texts and metadata, and print the counts as JSON.

    A record has an id (default: the hash of its text), a text and metadata. They are read from the keys of JSON, the
    columns of CSV, or the path and content of a file; other keys and columns become metadata. A second run replaces
    records with the same id; with --cache it computes no vector twice, and writes no row twice. A blank text is left
    out and counted, and the row that its id had is deleted at the end. If more rows would be deleted than --sync-max
    allows, all of them stay, and the exit code is 1. A record that cannot be stored is reported, kept as a dead
    letter, and the exit code is 1. SIGINT and SIGTERM end the run with exit code 130 or 143: the same command goes on.
    """
    with stop_signals() as signals, ExitStack() as stack:
        records = columns.records(source)
        chunking = chunks.chunking
        ray.check()

        from millpond.ingest.pipeline.ingest import check_model
        from millpond.ingest.pipeline.source_items import StopRequest

        # Opening a sink may create a database, so check first that the model can fill it. Loading the weights is the
        # slowest step and comes last.
        spec = engine.describe(model)
        check_model(spec, collection.widths)
        page = _Page.at(run.report, spec, {"source": source, **engine.settings}, collection.widths)
        stop = StopRequest()
        # First the files that the command names, so that an error names the one that it is about.
        vectors = open_cache(stack, run.cache) if ray.address is None else None
        arguments = {**run.arguments(source), "chunking": chunking, "stop": stop, "trace": page.trace}
        if ray.address is None:
            start, target = _here(stack, spec, collection, engine, vectors)
        else:
            start, target = _on_ray(model, collection, run.cache, ray, engine), collection.to
        signals.pass_to(stop)
        try:
            report = start(records, **arguments)
        except MillpondError as error:
            page.draw(None, target, stopped=str(error))
            if signals.code is None:
                raise
            print(f"millpond: {error}", file=sys.stderr)  # of the database, while the rest was written
            raise typer.Exit(signals.code) from None
        drawn = page.draw(report, target)
        _finish(report, signals, arguments["dead_letters"], drawn=drawn)


def _here(
    stack: ExitStack, spec: ModelSpec, collection: CollectionOptions, engine: EngineOptions, vectors: VectorCache | None
) -> tuple[Start, str]:
    """A run in this process, with everything open, and the name of its collection."""
    from millpond.engine.engine import Engine
    from millpond.ingest.pipeline.ingest import ingest
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.database import open_sink

    settings = {"dimensions": collection.widths, "fields": collection.fields, **collection.settings}
    sink = stack.enter_context(closing(open_sink(collection.to, **settings)))
    with suppress(SinkError):  # who may write a collection need not be allowed to list all
        if isinstance(sink, CollectionSink) and sink.collection in sink.collections():
            sink.open().check_model(spec, collection=sink.collection)  # before the weights are loaded
    loaded = stack.enter_context(engine.load(spec.name, cache=vectors))
    sparse = None
    if collection.sparse_model is not None:
        sparse = stack.enter_context(Engine(collection.sparse_model, **engine.placement))
    target = getattr(sink, "target", type(sink).__name__)
    return partial(ingest, engine=loaded, sparse_engine=sparse, sink=sink), target


def _on_ray(
    model: str, collection: CollectionOptions, cache: Path | None, ray: RayOptions, engine: EngineOptions
) -> Start:
    """A run on a cluster."""
    from millpond.ingest.ray import ingest_dataset
    from millpond.ingest.sinks.database import open_sink

    return partial(
        ingest_dataset,
        model=model,
        engine_options=engine.settings,
        sparse_model=collection.sparse_model,
        cache=cache,
        sink=partial(
            open_sink, collection.to, dimensions=collection.widths, fields=collection.fields, **collection.settings
        ),
        **vars(ray),
    )


@dataclass(frozen=True, kw_only=True)
class _Page:
    """The page of a run, if one is to be drawn."""

    path: Path | None
    trace: RunTrace
    spec: ModelSpec
    settings: dict[str, Any]
    stored: list[int]

    @classmethod
    def at(cls, path: Path | None, spec: ModelSpec, settings: dict[str, Any], widths: list[int] | None) -> _Page:
        """The page at a path, which is checked; ``None`` draws nothing."""
        from millpond.ingest.telemetry.trace import RunTrace

        if path is not None:
            from millpond.ingest.pages.report_page import check_report

            check_report(path)
        trace = RunTrace(vectors=0) if path is None else RunTrace()
        return cls(path=path, trace=trace, spec=spec, settings=settings, stored=widths or [spec.dimensions])

    def draw(self, report: IngestReport | None, target: str, *, stopped: str = "") -> bool:
        """Draw the run; what goes wrong is a line on standard error, since the rows are written, and ``False``."""
        if self.path is None:
            return True
        from millpond.ingest.pages.report_page import write_report

        given = {name: value for name, value in self.settings.items() if value is not None}
        shown = {"model": self.spec.name, "collection": target, **given}
        if report is not None and report.stopped:
            stopped = "a signal"
        widths = self.spec.matryoshka_dimensions or None
        try:
            with writing(self.path):
                write_report(self.path, report, self.trace, shown, widths=widths, stored=self.stored, stopped=stopped)
        except MillpondError as error:
            print(f"millpond: the report: {error}", file=sys.stderr)
            return False
        return True


# What a run may do beside writing: it is printed only if it did.
_OPTIONAL = ("unchanged", "deleted", "uncached", "cache_error", "stopped", "verification")


def _finish(report: IngestReport, signals: StopSignals, letters: DeadLetterFile | None, *, drawn: bool) -> None:
    """Print the report, say what went wrong in the last lines, and raise the exit code."""
    defaults = {each.name: each.default for each in fields(report) if each.name in _OPTIONAL}
    counts = asdict(report).items()
    print(json.dumps({name: value for name, value in counts if name not in defaults or value != defaults[name]}))
    problems = []
    if report.verification is not None and not report.verification.good:
        problems.append(
            f"the collection is not as it should be: {report.verification.missing} rows are missing and "
            f"{report.verification.different} are different; run again to write them"
        )
    if report.failed:
        count = "1 record was" if report.failed == 1 else f"{report.failed} records were"
        place = "the log names" if letters is None else f"the log and the dead letters in {letters.path} name"
        problems.append(f"{count} left out; {place} {'it' if report.failed == 1 else 'them'}")
    if report.uncached:
        problems.append(f"{report.uncached} vectors could not be cached: {report.cache_error}")
    if report.stopped:
        problems.append("stopped; run the same command again to go on")
    for problem in problems:
        print(f"millpond: {problem}", file=sys.stderr)
    if report.stopped and signals.code is not None:
        raise typer.Exit(signals.code)
    if problems or not drawn:
        raise typer.Exit(1)
