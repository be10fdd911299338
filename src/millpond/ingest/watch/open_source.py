"""The source that a command names: a folder, a file of JSONL, or a table of PostgreSQL."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from millpond.errors import InvalidRequestError, MissingExtraError, SourceNotFoundError
from millpond.ingest.sources.rows import Columns
from millpond.ingest.watch.folder_source import FolderSource
from millpond.ingest.watch.lines_source import SUFFIXES, LinesSource
from millpond.ingest.watch.source import WatchedSource

_TABLES = ("postgresql://", "postgres://")


def open_source(
    name: str,
    columns: Columns | None = None,
    *,
    poll: float | None = None,
    updated: str | None = None,
    notify: str | None = None,
) -> WatchedSource:
    """The source of a name.

    Args:
        name: A folder, a ``.jsonl`` or ``.ndjson``, or ``postgresql://HOST/DATABASE#TABLE``.
        columns: The keys or columns of a record; a folder has none.
        poll: Seconds between two looks; by default the system says what changed, and a table is looked at every 5
            seconds, with ``notify`` every 300.
        updated: The column of a table that says when a row was changed, ascending.
        notify: The channel of NOTIFY on which a table's changes are said.

    Returns:
        The source, which notices nothing yet.

    Raises:
        InvalidRequestError: Another kind of source, or an option that it does not have.
        SourceNotFoundError: There is no such folder or file.
        MissingExtraError: A package is missing.
    """
    columns = Columns() if columns is None else columns
    if poll is not None and not 0 < poll < 1e9:
        raise InvalidRequestError(f"poll={poll!r} must be a number of seconds above 0")
    if name.startswith(_TABLES):
        try:
            tables = import_module("millpond_pgvector.table_source")
        except ImportError:
            raise MissingExtraError("watching a table needs millpond-pgvector: pip install millpond-pgvector") from None
        source: WatchedSource = tables.TableSource(name, columns, poll=poll, updated=updated, notify=notify)
        return source
    for option, value in (("updated", updated), ("notify", notify)):
        if value is not None:
            raise InvalidRequestError(f"{option}={value!r} is of a table, and {name!r} is none; leave {option} out")
    if not name:  # Path would make it the working directory
        raise InvalidRequestError("the path of the source is empty; pass '.' for the working directory")
    path = Path(name).expanduser()
    if path.is_dir():
        if columns != Columns():
            raise InvalidRequestError(f"the files of the folder {name!r} have no columns; leave their names out")
        return FolderSource(path, poll=poll)
    if path.suffix.lower() in SUFFIXES:
        return LinesSource(path, columns, poll=poll)
    if not path.exists():
        raise SourceNotFoundError(f"there is no folder or file at {name!r}")
    raise InvalidRequestError(
        f"{name!r} cannot be watched; pass a folder, a .jsonl or .ndjson file, or postgresql://HOST/DATABASE#TABLE"
    )
