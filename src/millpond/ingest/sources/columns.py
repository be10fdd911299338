"""The columns of a table that a record is made of, checked before the first row."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from millpond.errors import InvalidRequestError


def check_names(id_column: str, text_column: str, metadata_columns: Collection[str] | None) -> None:
    """Raise InvalidRequestError for names that no source can have, and TypeError for a bare str of columns."""
    if id_column == text_column:
        raise InvalidRequestError(f"id_column and text_column are both {id_column!r}; name two columns")
    if metadata_columns is None:
        return
    if isinstance(metadata_columns, str):
        raise TypeError(f"metadata_columns={metadata_columns!r} is a str; pass a list of names")
    for name in metadata_columns:
        if not isinstance(name, str):
            raise TypeError(f"metadata_columns holds {name!r}; pass a list of names")
        if name in (id_column, text_column):
            raise InvalidRequestError(f"metadata_columns names {name!r}, which is the id or the text; leave it out")


def check_columns(
    name: str,
    columns: Sequence[str],
    *,
    id_column: str,
    text_column: str,
    metadata_columns: Collection[str] | None,
    nested: Collection[str] | None = (),
) -> None:
    """Check the columns of a table.

    Args:
        name: The table, for errors.
        columns: Its columns.
        id_column: Column of the id. The table may lack it only if it is the default.
        text_column: Column of the text.
        metadata_columns: The other columns that are kept; ``None``: all.
        nested: Keys of its column ``metadata``, which may be named too; ``None``: any.

    Raises:
        InvalidRequestError: It lacks a column, or has one twice.
    """
    shown = ", ".join(map(repr, columns)) or "none"
    for column, purpose in ((text_column, "the text"), (id_column, "the id")):
        if column not in columns and (column, purpose) != ("id", "the id"):
            raise InvalidRequestError(f"{name} has no column {column!r} for {purpose}; its columns: {shown}")
    if len(set(columns)) != len(columns):
        raise InvalidRequestError(f"{name} names a column twice; its columns: {shown}")
    if metadata_columns is None or nested is None:
        return
    unknown = [column for column in metadata_columns if column not in columns and column not in nested]
    if unknown:
        raise InvalidRequestError(
            f"{name} has no column {', '.join(map(repr, unknown))} for metadata; its columns: {shown}"
        )
