"""``millpond ingest``: embed records and write them to a vector database."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.stop_signals import StopSignals, stop_signals
from millpond.errors import MillpondError

if TYPE_CHECKING:
    from millpond.ingest.chunking import Chunking
    from millpond.ingest.telemetry.report import IngestReport
    from millpond.ingest.telemetry.trace import RunTrace
    from millpond.spec import ModelSpec


def ingest(
    source: Annotated[
        str,
        typer.Argument(
            help="A .jsonl, .ndjson, .json, .csv or .tsv file (each also as .gz or .zst), a .parquet, .arrow or "
            ".feather file, a folder of .txt and .md files, or - (JSONL on stdin)."
        ),
    ],
    *,
    model: options.Model,
    to: Annotated[
        str,
        typer.Option(
            help="URL of the collection, {sinks}. Keys are read from environment variables, which millpond env lists.",
            metavar="URL",
        ),
    ],
    dimensions: options.Widths = None,
    fields: Annotated[
        str, typer.Option(help="Layout of the stored records: plain, langchain or llama_index.", metavar="FORM")
    ] = "plain",
    datatype: Annotated[
        Literal["float32", "float16", "bfloat16", "int8", "uint8", "bit"] | None,
        typer.Option(help="Type of the stored numbers, where the database has it.", show_default="float32"),
    ] = None,
    index_quantization: Annotated[
        Literal["scalar", "product", "binary"] | None,
        typer.Option(help="How the database's index quantizes the vectors."),
    ] = None,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="Store sparse vectors too, for searches that fuse both.")
    ] = False,
    sparse_model: Annotated[
        str | None,
        typer.Option(help="Model of the sparse vectors, if it is another one.", metavar="MODEL"),
    ] = None,
    id_column: options.IdColumn = "id",
    text_column: options.TextColumn = "text",
    metadata_columns: Annotated[
        str | None,
        typer.Option(
            "--metadata", help="Keys or columns to store as metadata (default: all others).", metavar="COLUMN,..."
        ),
    ] = None,
    types: options.Types = None,
    chunk: Annotated[
        bool, typer.Option("--chunk", help="Cut texts that are longer than the model reads into chunks, a row each.")
    ] = False,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Cut texts into chunks of at most so many tokens.", metavar="N", min=1)
    ] = None,
    chunk_overlap: Annotated[
        float | None,
        typer.Option(
            help="Share of a chunk that the next one repeats, or from 1 on a number of tokens.",
            metavar="N",
            min=0.0,
            show_default="0.1",
        ),
    ] = None,
    keep_empty: Annotated[
        bool, typer.Option("--keep-empty", help="Store records without a visible character too.")
    ] = False,
    cache: options.Cache = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            help="File that notes what is written, so that the same command goes on where a run was stopped or killed "
            "(default: the cache's name with .journal).",
            metavar="PATH",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Leave out what the journal knows as written.")
    ] = True,
    dead_letters: Annotated[
        Path | None,
        typer.Option(
            help="File for the records that are left out, which can be ingested itself (default: the journal's name "
            "with .dead.jsonl).",
            metavar="PATH",
        ),
    ] = None,
    sync: Annotated[
        bool, typer.Option("--sync", help="Then delete the rows of records that the source no longer has.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Then look for every row, and compare the vectors of a sample.")
    ] = False,
    report_page: Annotated[
        Path | None,
        typer.Option("--report", help="Draw the run into an HTML page.", metavar="FILE.html"),
    ] = None,
    retry_for: Annotated[
        float,
        typer.Option(help="Seconds to wait for a database that does not answer.", metavar="SECONDS", min=0.0),
    ] = 120.0,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that a request to the database may take.", metavar="SECONDS", show_default="60"),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--ray",
            help="Embed on a Ray cluster: local (this machine), auto (a cluster that runs here), ray://host:10001.",
            metavar="ADDRESS",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--ray-workers", help="Workers of the cluster (default: as many as fit).", metavar="N", min=1),
    ] = None,
    num_cpus: Annotated[
        float, typer.Option("--ray-cpus", help="CPU cores of each worker.", metavar="N", min=0.0)
    ] = 1.0,
    num_gpus: Annotated[
        float, typer.Option("--ray-gpus", help="GPUs of each worker; 0.25 puts four on a GPU.", metavar="N", min=0.0)
    ] = 0.0,
    revision: options.Revision = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_length: options.MaxLength = None,
    pooling: options.Pooling = None,
    quantization: options.Quantization = None,
    hf_overrides: options.HfOverrides = None,
) -> None:
    """Embed records, write them to a database with their texts and metadata, and print the counts as JSON.

    A record has an id (default: the hash of its text), a text and metadata. They are read from the keys of JSON, the
    columns of CSV, or the path and content of a file; other keys and columns become metadata. A second run replaces
    records with the same id; with --cache it computes no vector twice, and writes no row twice. A blank text is left
    out and counted, and the row that its id had is deleted. A record that cannot be stored is reported, kept as a dead
    letter, and the exit code is 1. SIGINT and SIGTERM end the run with exit code 130 or 143: the same command goes on.
    """
    with stop_signals() as signals, ExitStack() as stack:
        from millpond.ingest.sources.read import read

        widths = options.read_widths(dimensions)
        records = read(
            source,
            id_column=id_column,
            text_column=text_column,
            metadata_columns=None if metadata_columns is None else metadata_columns.split(","),
            types=options.read_types(types),
        )
        chunking = _chunking(chunk=chunk, tokens=chunk_tokens, overlap=chunk_overlap)

        if address is None and (workers is not None or num_gpus or num_cpus != 1.0):
            raise typer.BadParameter("--ray-workers, --ray-cpus and --ray-gpus are those of --ray; name it too")

        from millpond.cache.vector_cache import VectorCache
        from millpond.config import EngineConfig
        from millpond.engine.engine import Engine
        from millpond.engine.loading import describe
        from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
        from millpond.ingest.pipeline.delivery import RetryPolicy
        from millpond.ingest.pipeline.ingest import check_model
        from millpond.ingest.pipeline.ingest import ingest as run
        from millpond.ingest.pipeline.journal import Journal
        from millpond.ingest.pipeline.stop import StopRequest
        from millpond.ingest.sinks.url import open_sink
        from millpond.ingest.telemetry.trace import RunTrace

        settings: dict[str, Any] = {
            "revision": revision,
            "device": device,
            "dtype": dtype,
            "max_length": max_length,
            "pooling": pooling,
            "quantization": quantization,
            "hf_overrides": hf_overrides,
        }
        # Opening a sink may create a database, so check first that the model can fill it. Loading the weights is the
        # slowest step and comes last.
        spec = describe(EngineConfig(model=model, **settings))
        check_model(spec, widths)
        trace = RunTrace(vectors=0)
        if report_page is not None:
            from millpond.ingest.pages.report_page import check_report

            check_report(report_page)
            trace = RunTrace()
        if journal is None and cache is not None:
            journal = Path(f"{cache}.journal")
        # First the files that the command names, so that an error names the one that it is about.
        vectors = None if cache is None or address is not None else stack.enter_context(VectorCache(cache))
        if dead_letters is None and journal is not None:
            Journal(journal).close()
            dead_letters = Path(f"{journal}.dead.jsonl")
        given = {
            "datatype": datatype,
            "index_quantization": index_quantization,
            "hybrid": hybrid or None,
            "timeout": timeout,
        }
        sink_options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        stop = StopRequest()
        arguments: dict[str, Any] = {
            "journal": journal,
            "resume": resume,
            "keep_empty": keep_empty,
            # It knows the source: a file of dead letters may be read and written in one run.
            "dead_letters": None if dead_letters is None else DeadLetterFile(dead_letters, source=source),
            "chunking": chunking,
            "sync": sync,
            "verify": verify,
            "retry": RetryPolicy(give_up_after=retry_for),
            "stop": stop,
            "trace": trace,
        }
        target = to
        if address is not None:
            from millpond.ingest.ray import ingest_dataset

            start = partial(
                ingest_dataset,
                records,
                model=model,
                engine_options=settings,
                sparse_model=sparse_model,
                cache=cache,
                sink=to,
                dimensions=widths,
                fields=fields,
                sink_options=sink_options,
                address=address,
                workers=workers,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                **arguments,
            )
        else:
            sink = stack.enter_context(closing(open_sink(to, dimensions=widths, fields=fields, **sink_options)))
            engine = stack.enter_context(Engine(model, cache=vectors, **settings))
            sparse = None
            if sparse_model is not None:
                sparse = stack.enter_context(Engine(sparse_model, device=device, dtype=dtype))
            target = getattr(sink, "target", type(sink).__name__)
            start = partial(run, records, engine=engine, sparse_engine=sparse, sink=sink, **arguments)
        signals.pass_to(stop)
        try:
            report = start()
        except MillpondError as error:
            if report_page is not None:
                _draw(
                    report_page, None, trace, spec, widths, target, {"source": source, **settings}, stopped=str(error)
                )
            if signals.code is None:
                raise
            print(f"millpond: {error}", file=sys.stderr)  # of the database, while the rest was written
            raise typer.Exit(signals.code) from None
        if report_page is not None:
            _draw(report_page, report, trace, spec, widths, target, {"source": source, **settings})
        _finish(report, signals)


def _chunking(*, chunk: bool, tokens: int | None, overlap: float | None) -> Chunking | None:
    if not chunk and tokens is None and overlap is None:
        return None
    from millpond.ingest.chunking import Chunking

    given: dict[str, Any] = (
        {} if overlap is None else {"overlap": int(overlap) if overlap >= 1 and overlap.is_integer() else overlap}
    )
    return Chunking(max_tokens=tokens, **given)


def _draw(
    path: Path,
    report: IngestReport | None,
    trace: RunTrace,
    spec: ModelSpec,
    stored: list[int] | None,
    target: str,
    settings: dict[str, Any],
    *,
    stopped: str = "",
) -> None:
    from millpond.ingest.pages.report_page import write_report

    given = {name: value for name, value in settings.items() if value is not None}
    shown = {"model": spec.name, "collection": target, **given}
    if report is not None and report.stopped:
        stopped = "a signal"
    widths = spec.matryoshka_dimensions or None
    stored = stored or [spec.dimensions]
    try:
        write_report(path, report, trace, shown, widths=widths, stored=stored, stopped=stopped)
    except OSError as error:  # the rows are written, and their counts are still to be printed
        print(f"millpond: the report could not be written: {error}", file=sys.stderr)


def _finish(report: IngestReport, signals: StopSignals) -> None:
    """Print the report, say what went wrong in the last lines, and raise the exit code."""
    print(json.dumps(_counts(report)))
    problems = []
    if report.verification is not None and not report.verification.good:
        problems.append(
            f"the collection is not as it should be: {report.verification.missing} rows are missing and "
            f"{report.verification.different} are different; run again to write them"
        )
    if report.failed:
        count = "1 record was" if report.failed == 1 else f"{report.failed} records were"
        problems.append(f"{count} left out; the log and the dead letters name them")
    if report.uncached:
        problems.append(f"{report.uncached} vectors could not be cached: {report.cache_error}")
    if report.stopped:
        problems.append("stopped; run the same command again to go on")
    for problem in problems:
        print(f"millpond: {problem}", file=sys.stderr)
    if report.stopped and signals.code is not None:
        raise typer.Exit(signals.code)
    if problems:
        raise typer.Exit(1)


def _counts(report: IngestReport) -> dict[str, Any]:
    """The report as JSON; what a run may do beside writing is there only if it did."""
    optional = {
        field.name: field.default
        for field in fields(report)
        if field.name in ("unchanged", "deleted", "uncached", "cache_error", "stopped", "verification")
    }
    return {
        name: value
        for name, value in asdict(report).items()
        if optional.get(name, MISSING) is MISSING or value != optional[name]
    }
