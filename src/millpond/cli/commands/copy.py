"""``millpond copy``: the rows of a collection, written to another one of any database."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.groups import SinkOptions, SyncOptions, grouped
from millpond.cli.arguments.options import option
from millpond.cli.arguments.stop_signals import StopSignals, stop_signals
from millpond.cli.output.columns import aligned
from millpond.errors import InvalidRequestError, MillpondError

if TYPE_CHECKING:
    from millpond.ingest.copying.report import CopyReport
    from millpond.ingest.sinks.collection import CollectionSink


@dataclass(frozen=True, kw_only=True)
class TargetOptions(SinkOptions):
    """What the target stores."""

    dimensions: options.StoredWidths = None
    fields: options.Fields = None
    dense_only: bool = option(False, "Leave the sparse vectors of a hybrid collection out.", flags="--dense-only")

    def open(self, url: str, *, sparse: bool) -> Any:
        """The target's sink; ``sparse``: of a source that has sparse vectors."""
        from millpond.ingest.sinks.database import installed, open_sink

        settings = dict(self.settings)
        if sparse and not self.dense_only:
            database = installed().get(url.partition("+")[0].lower())
            if database is not None and database.options is not None and "hybrid" not in database.options:
                raise InvalidRequestError(
                    "the source holds sparse vectors too, which this database does not store; --dense-only leaves them "
                    "out"
                )
            settings.setdefault("hybrid", True)
        return open_sink(url, dimensions=options.read_widths(self.dimensions), fields=self.fields, **settings)


@grouped
def copy(
    source: Annotated[str, typer.Argument(help="URL of the collection to read, {sinks}.", metavar="FROM_URL")],
    to: Annotated[str, typer.Argument(help="URL of the collection to write.", metavar="TO_URL")],
    *,
    target: TargetOptions,
    dead_letters: options.DeadLetters = None,
    sync: SyncOptions,
    rows_per_second: Annotated[
        float | None,
        typer.Option(help="Most rows to copy or embed in a second.", metavar="N", show_default="no limit", min=0.001),
    ] = None,
    format: Annotated[Literal["table", "json"], typer.Option(help=options.FORMAT)] = "table",
) -> None:
    """Copy a collection to another one, of any database: vectors, texts and metadata. Nothing is computed.

    A new collection has the model, widths, layout and chunks of the source. What the target holds already is left out,
    so that the same command goes on where a copy was stopped or killed. A row that the target does not take is
    reported, and the exit code is 1. At the end the rows are counted, and a sample is compared. SIGINT and SIGTERM end
    the copy with exit code 130 or 143.
    """
    with stop_signals("what is read is written") as signals, ExitStack() as stack:
        from millpond.ingest.copying.copy import copy as copy_rows
        from millpond.ingest.pipeline.source_items import StopRequest
        from millpond.ingest.sinks.database import open_sink
        from millpond.ingest.sinks.stored_rows import rows_manifest

        read = _collection(stack, source, open_sink(source, must_exist=True))
        manifest = rows_manifest(read, verb="copied")  # before the target's folder or file is made
        written = _collection(stack, to, target.open(to, sparse=manifest.sparse is not None))
        stop = StopRequest()
        signals.pass_to(stop)
        try:
            report = copy_rows(
                read,
                written,
                dense_only=target.dense_only,
                rows_per_second=rows_per_second,
                dead_letters=dead_letters,
                stop=stop,
                **asdict(sync),
            )
        except MillpondError as error:
            if signals.code is None:
                raise
            print(f"millpond: {error}", file=sys.stderr)  # of a database, while the rest was written
            raise typer.Exit(signals.code) from None
        _finish(report, signals, table=format == "table")


def _collection(stack: ExitStack, url: str, sink: Any) -> CollectionSink[Any]:
    """The sink, closed with the stack, if it is that of a collection."""
    from millpond.ingest.sinks.collection import CollectionSink

    opened = stack.enter_context(closing(sink))
    if not isinstance(opened, CollectionSink):
        raise InvalidRequestError(f"{url.partition(':')[0]!r} only writes; its rows cannot be copied")
    return opened


def _finish(report: CopyReport, signals: StopSignals, *, table: bool) -> None:
    """Print the report, say what went wrong in the last lines, and raise the exit code."""
    counts = asdict(report)
    if table:
        print(*aligned(_lines(report)), sep="\n")
    else:
        print(json.dumps(counts))
    problems = []
    if report.failed:
        count = "1 row was" if report.failed == 1 else f"{report.failed} rows were"
        problems.append(f"{count} left out; the log names them")
    if report.verification is not None and not report.verification.good:
        problems.append("the target is not as it should be; run again to write what is missing")
    if report.stopped:
        problems.append("stopped; run the same command again to go on")
    for problem in problems:
        print(f"millpond: {problem}", file=sys.stderr)
    if report.stopped and signals.code is not None:
        raise typer.Exit(signals.code)
    if problems:
        raise typer.Exit(1)


def _lines(report: CopyReport) -> list[tuple[str, str]]:
    names = ("read", "written", "unchanged", "failed", "deleted", "retried")
    lines = [(name, f"{count:,}") for name in names if (count := getattr(report, name)) or name in ("read", "written")]
    if (found := report.verification) is not None:
        lines.append(("in the target", f"{found.rows:,}"))
        lines.append(("compared", f"{found.compared:,}, {found.different} different"))
    return [*lines, ("seconds", f"{report.seconds:.1f}")]
