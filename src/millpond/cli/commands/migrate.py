"""``millpond migrate``: change the model, the widths or the chunks of a collection that is in use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.flags import Command, Group
from millpond.cli.arguments.groups import EngineOptions, SinkOptions, grouped, open_cache
from millpond.cli.arguments.options import option
from millpond.cli.arguments.stop_signals import stop_signals
from millpond.cli.commands.ingest import ChunkOptions, ColumnOptions
from millpond.cli.output.columns import aligned
from millpond.errors import InvalidRequestError

if TYPE_CHECKING:
    from millpond.cache.vector_cache import VectorCache
    from millpond.engine.engine import Engine
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.migrate.migration import Migration
    from millpond.migrate.outcome import Outcome
    from millpond.migrate.row_copy import CopyOptions
    from millpond.values.spec import ModelSpec

app = typer.Typer(
    name="migrate",
    cls=Group,
    no_args_is_help=True,
    help="Change the model, the widths or the chunks of a collection, while it is searched and written to.",
)

# Tokens of a batch under --rows-per-second, unless --engine says otherwise: searches here wait for one at most.
_GENTLE_TOKENS = 256

Url = Annotated[str, typer.Argument(metavar="URL", help="URL of the collection: {sinks}.")]
Format = Annotated[Literal["table", "json"], typer.Option(help=options.FORMAT)]


@dataclass(frozen=True, kw_only=True)
class ChangeOptions(SinkOptions):
    """What the new collection has."""

    model: options.Model
    to: str | None = option(
        None, "URL of the new collection (default: at the same location, with a name of its own).", "NEW-URL"
    )
    dimensions: options.Widths = None
    sparse_model: options.SparseModel = None
    source: str | None = option(
        None, "Read the records from their source again, as ingest did, and not from the collection.", "SOURCE"
    )


@dataclass(frozen=True, kw_only=True)
class CopyingOptions:
    """How rows are embedded and written."""

    rows_per_second: float | None = option(None, "Most rows to copy or embed in a second.", "N", min=1e-3)
    bridge: bool = option(
        False,
        "First fit a bridge on at most 20,000 rows: until the cut-over, its questions find old vectors, too.",
        flags="--bridge",
    )
    cache: options.Cache = None
    retry_for: float = option(120.0, "Seconds to wait for a database that does not answer.", "SECONDS", min=0.0)


@app.command(cls=Command)
@grouped
def plan(
    url: Url,
    *,
    change: ChangeOptions,
    chunks: ChunkOptions,
    engine: EngineOptions,
    format: Format = "table",
) -> None:
    """Print what a migration would do: rows, time and disk. Nothing is written.

    The time is measured with some rows of the collection. What cannot be migrated is refused with the reason, and exit
    code 2.
    """
    from millpond.migrate.plan import plan as make_plan

    with ExitStack() as stack:
        head = stack.enter_context(_opened(url))
        migration = _migration(head, change, chunks, engine, ColumnOptions())
        migration.check()
        found = make_plan(migration, stack.enter_context(engine.load(change.model)))
    _print(asdict(found), format)


@app.command(cls=Command)
@grouped
def run(
    url: Url,
    *,
    change: ChangeOptions,
    chunks: ChunkOptions,
    columns: ColumnOptions,
    copying: CopyingOptions,
    engine: EngineOptions,
) -> None:
    """Fill a collection of the new model beside the old one, keep it in step, verify it, and cut over.

    Searches and writes go on by the same name: until the cut-over they use the old collection, from then on the new
    one. Run the same command again after it was stopped or killed; it goes on where it was. A row that cannot be
    embedded or stored is reported, nothing is cut over then, and the exit code is 1.
    """
    from millpond.ingest.pipeline.delivery import RetryPolicy
    from millpond.ingest.pipeline.source_items import StopRequest
    from millpond.migrate.row_copy import CopyOptions

    with stop_signals() as signals, ExitStack() as stack:
        head = stack.enter_context(_opened(url))
        stop = StopRequest()
        settings = CopyOptions(
            rows_per_second=copying.rows_per_second,
            retry=RetryPolicy(give_up_after=copying.retry_for),
            stop=stop,
        )
        migration = _migration(head, change, chunks, engine, columns, settings)
        migration.check()
        vectors = open_cache(stack, copying.cache)
        gentle = {} if copying.rows_per_second is None else {"max_batch_tokens": _GENTLE_TOKENS}
        loaded = stack.enter_context(_engine(change.model, {**gentle, **engine.settings}, cache=vectors))
        sparse = (
            None if change.sparse_model is None else stack.enter_context(_engine(change.sparse_model, engine.placement))
        )
        signals.pass_to(stop)
        outcome = migration.run(loaded, sparse_engine=sparse, bridge=copying.bridge)
    _end(outcome, signals.code)


@app.command(cls=Command)
def status(url: Url, *, format: Format = "table") -> None:
    """Print how far a migration is: its phase, the share of the rows, and the time that is left."""
    from millpond.migrate.plan import status as read_status

    with _opened(url) as head:
        found = read_status(head)
    _print(asdict(found), format)


@app.command(cls=Command)
@grouped
def rollback(
    url: Url,
    *,
    model: options.StoredModel = None,
    mirror: Annotated[
        bool,
        typer.Option("--mirror/--no-mirror", help="Embed by the old model what was written since the cut-over."),
    ] = True,
    engine: EngineOptions,
) -> None:
    """Let the old collection serve again, with the rows that were written since the cut-over.

    These are embedded by the old model, which is opened again. Before the cut-over, the migration is given up. The new
    collection stays, so that millpond migrate run goes on with it; finish drops it.
    """
    from millpond.ingest.pipeline.source_items import StopRequest
    from millpond.migrate.migration import Migration
    from millpond.migrate.row_copy import CopyOptions
    from millpond.search.stored_model import describe_stored, placement

    with stop_signals() as signals, ExitStack() as stack:
        head = stack.enter_context(_opened(url))
        stop = StopRequest()
        migration = Migration(head, options=CopyOptions(stop=stop))
        found, loaded, sparse = head.succession(), None, None
        if mirror and found is not None and found.phase == "live":
            old = head.named(found.other).own()
            owner, words = "The former collection", "--model, or roll back with --no-mirror"
            described = describe_stored(old.identity, model, engine.settings, owner=owner, option=words)
            old.check_model(described.spec, collection=found.other)
            loaded = stack.enter_context(_engine(described.spec.name, described.settings))
            if old.sparse is not None and old.sparse.fingerprint != old.fingerprint:
                own = describe_stored(old.sparse, None, placement(engine.settings), owner=owner, option=words)
                sparse = stack.enter_context(_engine(own.spec.name, own.settings))
        signals.pass_to(stop)
        outcome = migration.rollback(loaded, sparse_engine=sparse)
    _end(outcome, signals.code)


@app.command(cls=Command)
def finish(
    url: Url,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Drop it; else only what would be dropped is said.")] = False,
) -> None:
    """Drop the collection that does not serve: after a cut-over the old one, after a rollback the new one.

    The name goes on: it stays as an empty collection that points to the one that serves.
    """
    from millpond.migrate.migration import Migration

    with _opened(url) as head:
        migration = Migration(head)
        found = head.succession()
        if not yes and found is not None and found.other:
            raise InvalidRequestError(
                f"finish would drop collection {found.other!r} of {head.named(found.other).own().model}, of whose "
                f"rows {migration.lacking()} are not in {found.serving!r}; write --yes to drop it"
            )
        outcome = migration.finish()
    _end(outcome, None)


@contextmanager
def _opened(url: str) -> Iterator[CollectionSink[Any]]:
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.database import open_sink

    sink = open_sink(url, must_exist=True)
    try:
        if not isinstance(sink, CollectionSink):
            raise InvalidRequestError(f"{url.partition(':')[0]!r} only writes; it has no collections to migrate")
        sink.open()
        yield sink
    finally:
        sink.close()


def _engine(model: str, settings: Mapping[str, Any], *, cache: VectorCache | None = None) -> Engine:
    from millpond.engine.engine import Engine

    return Engine(model, cache=cache, **settings)


def _described(model: str, engine: EngineOptions) -> ModelSpec:
    from millpond.search.stored_model import describe_named

    return describe_named(model, engine.placement).spec


def _migration(
    head: CollectionSink[Any],
    asked: ChangeOptions,
    chunks: ChunkOptions,
    engine: EngineOptions,
    columns: ColumnOptions,
    copying: CopyOptions | None = None,
) -> Migration:
    """The migration that the options describe; no weights are loaded."""
    from millpond.migrate.change import Change
    from millpond.migrate.migration import Migration

    if asked.source == "-":
        raise typer.BadParameter("the source is read more than once; name a file", param_hint="--source")
    source = asked.source
    change = Change(
        spec=engine.describe(asked.model),
        dimensions=options.read_widths(asked.dimensions),
        sparse=None if asked.sparse_model is None else _described(asked.sparse_model, engine),
        chunking=chunks.chunking,
        records=None if source is None else lambda: columns.records(source),
        options=asked.settings,
        to=asked.to,
    )
    return Migration(head, change, options=copying)


def _print(found: dict[str, Any], format: str) -> None:
    if format == "json":
        print(json.dumps(found, ensure_ascii=False))
        return
    steps = found.pop("steps", ())
    rows = [(name.replace("_", " "), _cell(name, value)) for name, value in found.items() if value not in (None, "")]
    print(*aligned(rows), sep="\n")
    for number, step in enumerate(steps, start=1):
        print(f"{number}. {step}")


def _cell(name: str, value: object) -> str:
    if name == "since" and isinstance(value, float):
        return datetime.fromtimestamp(value, UTC).isoformat(timespec="seconds")
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 1e6:,.1f} MB"
    if name.startswith("seconds") and isinstance(value, float):
        return str(timedelta(seconds=round(value)))
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)


def _end(outcome: Outcome, code: int | None) -> None:
    """Print what was done, say what is left to do, and raise the exit code."""
    print(json.dumps(asdict(outcome)))
    problems = []
    if outcome.failed:
        problems.append(f"{outcome.failed} records were left out, so nothing was cut over; the log says why")
    if outcome.stopped:
        problems.append("stopped; run the same command again to go on")
    for problem in problems:
        print(f"millpond: {problem}", file=sys.stderr)
    if code is not None or problems:
        raise typer.Exit(code or 1)
