"""``millpond watch``: keep a collection equal to a folder, a file or a table that changes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.arguments.groups import EngineOptions, TextOptions, grouped, open_cache
from millpond.cli.arguments.options import Model, option
from millpond.cli.arguments.stop_signals import stop_signals
from millpond.cli.commands.ingest import CollectionOptions, DocumentChunkOptions, StateOptions, metadata_option
from millpond.errors import SinkError
from millpond.support.cache_folder import cache_folder

if TYPE_CHECKING:
    from millpond.ingest.sinks.protocol import Sink
    from millpond.ingest.sources.rows import Columns
    from millpond.values.spec import ModelSpec

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder of files, a .jsonl or .ndjson file that grows, or postgresql://HOST/DATABASE#TABLE.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class KeyOptions(TextOptions):
    """The keys or columns of a record."""

    metadata_columns: str | None = metadata_option()

    @property
    def keys(self) -> Columns:
        """The names, as a source takes them."""
        from millpond.ingest.sources.rows import Columns

        names, text = self.metadata_columns, self.columns
        kept = None if names is None else [name for name in names.split(",") if name]
        return Columns(id=text["id_column"], text=text["text_column"], template=text["template"], metadata=kept)


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How changes are noticed, and when rows are deleted."""

    grace: float = option(
        10.0, "Seconds after which the rows of what is gone are deleted, if it is not back.", "SECONDS", min=0.0
    )
    poll: float | None = option(
        None,
        "Look for changes every so many seconds, as on network disks (default: when the system tells of them; of a "
        "table 5, with --notify 300).",
        "SECONDS",
        min=0.05,
    )
    updated: str | None = option(None, "Column of a table that says when a row was changed, ascending.", "COLUMN")
    notify: str | None = option(None, "Channel of NOTIFY by which a table's changes are told.", "CHANNEL")
    metrics: str | None = option(None, "Serve /metrics for Prometheus, and /health, at this address.", "HOST:PORT")


@grouped
def watch(
    source: Source,
    *,
    model: Model,
    collection: CollectionOptions,
    columns: KeyOptions,
    chunks: DocumentChunkOptions,
    state: StateOptions,
    follow: WatchOptions,
    engine: EngineOptions,
) -> None:
    """Keep a collection equal to a folder, to a JSONL file that grows, or to a table of PostgreSQL.

    First the whole source is ingested as by millpond ingest --sync, then only what changes is embedded. Rows of what is
    gone are deleted after --grace seconds. A database that does not answer is waited for. SIGINT and SIGTERM end it
    with exit code 130 or 143; after them, and after a kill, the same command goes on. Journal and cache are kept in
    ~/.cache/millpond/watch, unless the options name others.
    """
    with stop_signals() as signals, ExitStack() as stack:
        from millpond.engine.engine import Engine
        from millpond.ingest.pipeline.delivery import RetryPolicy
        from millpond.ingest.pipeline.ingest import check_model
        from millpond.ingest.pipeline.options import RunOptions
        from millpond.ingest.sinks.database import open_sink
        from millpond.ingest.watch.metrics import read_address
        from millpond.ingest.watch.open_source import open_source
        from millpond.ingest.watch.source import Waker
        from millpond.ingest.watch.watcher import watch as follow_source

        address = None if follow.metrics is None else read_address(follow.metrics)
        watched = open_source(source, columns.keys, poll=follow.poll, updated=follow.updated, notify=follow.notify)
        spec = engine.describe(model)
        check_model(spec, collection.widths)
        cache, journal = _files(state, source, collection.to, spec.fingerprint)
        vectors = open_cache(stack, cache)
        opened = partial(
            open_sink, collection.to, dimensions=collection.widths, fields=collection.fields, **collection.settings
        )
        _check_collection(opened, spec)  # before the weights are loaded
        loaded = stack.enter_context(engine.load(spec.name, cache=vectors))
        sparse = None
        if collection.sparse_model is not None:
            sparse = stack.enter_context(Engine(collection.sparse_model, **engine.placement))
        options = RunOptions(
            journal=journal,
            dead_letters=state.dead_letters,
            chunking=chunks.chunking,
            sync_max=state.sync_max,
            retry=RetryPolicy(give_up_after=math.inf),
        )
        stop = Waker()
        signals.pass_to(stop)
        report = follow_source(
            watched,
            engine=loaded,
            open_sink=opened,
            options=options,
            grace=follow.grace,
            metrics=address,
            stop=stop,
            sparse_engine=sparse,
        )
        print(json.dumps(asdict(report)))
        raise typer.Exit(signals.code or 0)


def _check_collection(opened: Callable[[], Sink], spec: ModelSpec) -> None:
    """Raise FingerprintMismatchError for a collection of another model."""
    from millpond.ingest.sinks.collection import CollectionSink

    with suppress(SinkError), closing(opened()) as sink:  # who may write need not be allowed to list
        if isinstance(sink, CollectionSink) and sink.collection in sink.collections():
            sink.open().check_model(spec, collection=sink.collection)


def _files(state: StateOptions, source: str, url: str, fingerprint: str) -> tuple[Path, Path]:
    """The cache and the journal: those that are named, or those of this source, collection and model."""
    cache, journal = state.cache, state.journal
    if cache is None:
        name = "\0".join((source if "://" in source else str(Path(source).absolute()), url, fingerprint))
        digest = blake2b(name.encode(errors="surrogateescape"), digest_size=12).hexdigest()
        folder = cache_folder() / "watch"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        cache = folder / f"{digest}.cache" if journal is None else Path(f"{journal}.cache")
    return cache, Path(f"{cache}.journal") if journal is None else journal
