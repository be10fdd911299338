"""``millpond collections``: which collections a database has, and what one of them stores."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.flags import Command, Group
from millpond.cli.output.columns import aligned
from millpond.cli.output.results_table import one_line
from millpond.errors import InvalidRequestError, MillpondError

if TYPE_CHECKING:
    from millpond.ingest.sinks.collection import CollectionSink

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="collections",
    cls=Group,
    no_args_is_help=True,
    help="List the collections of a database, and show what one of them stores.",
)

Format = Annotated[Literal["table", "json"], typer.Option(help=options.FORMAT)]
# A name that every database accepts, where a URL has none: nothing is made of it.
_ANY = "docs"


@app.command(cls=Command, name="list")
def list_(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="URL of a database, with or without a collection: {sinks}."),
    ],
    *,
    format: Format = "table",
) -> None:
    """Print the collections of a database: name, rows, what they hold, model, widths and data type.

    Also those that millpond did not make. In a pipe, the values of a line are between tabs. An index in a folder has
    millpond index stats.
    """
    base = url if "#" in url else f"{url}#{_ANY}"
    with _opened(base) as sink:
        names = sink.collections()
    found = [_described(f"{base.rpartition('#')[0]}#{name}", name) for name in names]
    if format == "json":
        print(json.dumps({"url": base.rpartition("#")[0], "collections": found}, ensure_ascii=False))
        return
    rows = [[_cell(each.get(key)) for key in _COLUMNS] for each in found]
    if not sys.stdout.isatty():
        for row in rows:
            print(*row, sep="\t")
    elif rows:
        print(*aligned([_COLUMNS, *rows], right={1}), sep="\n")
    if not rows:
        typer.echo(f"there is no collection at {base.rpartition('#')[0]}", err=True)


@app.command(cls=Command)
def show(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of the collection, {sinks}.")],
    *,
    format: Format = "table",
) -> None:
    """Print what a collection stores: its model and settings, widths, data type, fields, sparse vectors and rows."""
    if "#" not in url:
        with _opened(f"{url}#{_ANY}") as sink:
            names = ", ".join(f"{url}#{name}" for name in sink.collections())
        raise InvalidRequestError(
            f"{url!r} names no collection; choose {names or 'another database, since it is empty'}"
        )
    with _opened(url) as sink:
        found = sink.describe().to_json()
    if format == "json":
        print(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        print(*aligned([(key, _cell(value)) for key, value in found.items()]), sep="\n")


_COLUMNS = ("name", "rows", "kind", "model", "dimensions", "datatype")


@contextmanager
def _opened(url: str) -> Iterator[CollectionSink[Any]]:
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.database import open_sink

    sink = open_sink(url, must_exist=True)
    try:
        if not isinstance(sink, CollectionSink):
            raise InvalidRequestError(f"{url.partition(':')[0]!r} only writes; it has no collections to read")
        yield sink
    finally:
        sink.close()


def _described(url: str, name: str) -> dict[str, Any]:
    """A collection, as JSON; of one that cannot be read only why, and of a foreign one what there is."""
    try:
        with _opened(url) as sink:
            return sink.describe().to_json()
    except MillpondError as error:
        logger.warning("%s: %s", name, error)
        return {"name": name, "kind": "not readable"}


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_cell(each)}" for key, each in value.items() if each not in (None, "", [], {}))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else one_line(str(value))
