"""``millpond index``: a late-interaction index on disk, built, changed, searched and checked."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.filters import Filter, read_filter
from millpond.cli.arguments.flags import Command, Group
from millpond.cli.arguments.groups import EngineOptions, RecordOptions, grouped
from millpond.cli.arguments.opened_index import opened_index, reopened_index, stored_index
from millpond.cli.arguments.options import option
from millpond.cli.arguments.written import output_problem
from millpond.errors import MillpondError
from millpond.ingest.sources.pipe import check_standard_input
from millpond.late_interaction.codecs.names import PlaidCodec
from millpond.support.filters import no_match

if TYPE_CHECKING:
    from millpond.ingest import Record, Rejected
    from millpond.late_interaction import PlaidIndex

logger = logging.getLogger(__name__)

# Records that one call of ``add`` gets: what a stop in the middle can lose, a minute's work of a small model.
_BATCH = 4096
_INTERRUPTED = 130  # as a shell reports Ctrl-C
# What a run counts; the counts of records add up to ``read``, but for ``truncated``.
_COUNTS = ("read", "added", "replaced", "unchanged", "blank", "failed", "truncated")

app = typer.Typer(
    name="index",
    cls=Group,
    no_args_is_help=True,
    help="Build, change, search and check a late-interaction index: token vectors on disk, compared by MaxSim.",
)

IndexPath = Annotated[Path, typer.Argument(help="Folder of the index.", metavar="INDEX")]


class IndexCommand(Command):
    """A command whose errors of the file system are messages: a full disk, a folder that cannot be written."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (MillpondError, BrokenPipeError):
            raise
        except OSError as error:
            if output_problem() is not None:
                raise
            raise MillpondError(f"{error}; the index is as the last commit left it") from error


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """How a new index stores token vectors: the arguments of :class:`millpond.late_interaction.PlaidIndex`."""

    codec: PlaidCodec = option(
        "4", "How token vectors are stored; 4 and 2 are residuals of so many bits beside a centroid."
    )
    dimensions: options.Width = None
    pool_factor: int = option(1, "Mean number of a document's tokens that become one vector.", "N", min=1)


@app.command(cls=IndexCommand)
@grouped
def build(
    index: IndexPath,
    source: options.RecordSource,
    *,
    model: options.Model,
    layout: LayoutOptions,
    records: RecordOptions,
    engine_options: EngineOptions,
) -> None:
    """Create an index of the records of SOURCE, and print the counts as JSON.

    Records are read as by ingest. If the run is stopped, the same command goes on: records that the index has, with
    the same text and metadata, are not encoded again. A record that cannot be stored is reported, and the exit code
    is 1. Token vectors can have any width below the model's own: what the model was not trained for is made by PCA.
    """
    items = records.read(source)
    with opened_index(index, model, engine_options, **vars(layout)) as opened:
        _add(opened, items)


@app.command(cls=IndexCommand)
@grouped
def add(
    index: IndexPath,
    source: options.RecordSource,
    *,
    model: options.StoredModel = None,
    records: RecordOptions,
    engine_options: EngineOptions,
) -> None:
    """Add the records of SOURCE to an index, and print the counts as JSON.

    A record replaces the document of the same id; one that the index has, with the same text and metadata, is not
    encoded again. A blank text is left out, and the document that its id had is deleted.
    """
    items = records.read(source)
    with reopened_index(index, model, engine_options) as opened:
        _add(opened, items)


@app.command(cls=IndexCommand)
def delete(
    index: IndexPath,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Ids of documents, or - for one id per line on stdin.")
    ] = None,
    *,
    filter: Filter = None,
) -> None:
    """Delete documents by id or by metadata, and print how many there were as JSON."""
    conditions = read_filter(filter)
    if bool(ids) == (conditions is not None):
        raise typer.BadParameter("name ids or --filter, one of them", param_hint="ID")
    if ids == ["-"]:
        check_standard_input()
    wanted = [line.rstrip("\r\n") for line in sys.stdin if line.strip()] if ids == ["-"] else ids
    with stored_index(index) as opened:
        deleted = opened.delete(wanted) if wanted is not None else opened.delete(filter=conditions)
    print(json.dumps({"deleted": deleted}))


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Which documents: the options of :meth:`millpond.late_interaction.PlaidIndex.search`."""

    k: options.K = 10
    filter: Filter = None
    candidates: int | None = option(None, "Results that the stage before the last keeps.", "N", min=1)
    exact: bool = option(False, "Score every document, without a first stage.", flags="--exact")


@app.command(cls=IndexCommand)
@grouped
def search(
    index: IndexPath,
    query: options.Query,
    *,
    model: options.StoredModel = None,
    asked: SearchOptions,
    format: Annotated[Literal["table", "jsonl"], typer.Option(help=options.FORMAT)] = "table",
    engine_options: EngineOptions,
) -> None:
    """Print the documents whose token vectors match those of QUERY best, best first.

    In a pipe, a line of the table has score, id and text between tabs.
    """
    wanted: Any = vars(asked) | {"filter": read_filter(asked.filter)}
    with reopened_index(index, model, engine_options) as opened:
        hits = opened.search([query], **wanted)[0]
    if not hits and wanted["filter"]:
        logger.warning(no_match(wanted["filter"]))
    if format == "jsonl":
        for hit in hits:
            print(json.dumps(asdict(hit), ensure_ascii=False))
    else:
        from millpond.cli.output.results_table import Row, print_rows

        print_rows([Row(score=hit.score, id=hit.id, text=hit.text) for hit in hits])


@app.command(cls=IndexCommand)
def stats(index: IndexPath) -> None:
    """Print the size of an index as JSON."""
    with stored_index(index) as opened:
        print(json.dumps(asdict(opened.stats()), default=str, indent=2))


@app.command(cls=IndexCommand)
def check(index: IndexPath) -> None:
    """Read every file of an index, and print what is damaged; the exit code is then 1."""
    with stored_index(index) as opened:
        problems = opened.check()
        documents = len(opened)
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    print(f"{index}: {documents} documents, no damage")


@app.command(cls=IndexCommand)
def compact(index: IndexPath) -> None:
    """Merge the segments of an index, and give back the space of deleted documents."""
    with stored_index(index) as opened:
        opened.compact()
        print(json.dumps(asdict(opened.stats()), default=str, indent=2))


def _add(index: PlaidIndex, records: Iterator[Record | Rejected]) -> None:
    """Add records in batches, and print the counts."""
    from millpond.support.progress import draw_bar

    counts, started = dict.fromkeys(_COUNTS, 0), time.perf_counter()
    try:
        with draw_bar(show=True, unit=" texts") as bar:
            while batch := list(islice(records, _BATCH)):
                _add_batch(index, batch, counts)
                bar.update(len(batch))
    except KeyboardInterrupt:
        logger.warning("stopped after %d records; the same command goes on from there", counts["read"])
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        print(json.dumps({**counts, "seconds": round(time.perf_counter() - started, 3)}))
    if counts["failed"]:
        raise typer.Exit(1)


def _add_batch(index: PlaidIndex, batch: Sequence[Record | Rejected], counts: dict[str, int]) -> None:
    from millpond.ingest.record import Record

    changed: list[Record] = []
    for item in batch:
        if not isinstance(item, Record):
            counts["failed"] += 1
            logger.error("%s: %s", item.where, item.reason)
        elif (old := index.get(item.id)) is not None and (old.text, old.metadata) == (item.text, item.metadata):
            counts["unchanged"] += 1
        else:
            changed.append(item)
    if changed:
        report = index.add(
            [one.id for one in changed], [one.text for one in changed], [one.metadata for one in changed]
        )
        for name in ("added", "replaced", "blank", "truncated"):
            counts[name] += getattr(report, name)
    counts["read"] += len(batch)
