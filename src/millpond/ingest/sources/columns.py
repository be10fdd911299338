"""Columns: which columns or keys of a source make up a record, checked before the first row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from millpond.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of a source's columns or keys."""

    id: str = "id"  # of the id. A table may lack it only if this is the default
    text: str = "text"  # of the text
    metadata: Collection[str] | None = None  # those that are kept as metadata; `None`: all others

    def __post_init__(self) -> None:
        if self.id == self.text:
            raise InvalidRequestError(f"id_column and text_column are both {self.id!r}; name two columns")
        if self.metadata is None:
            return
        if isinstance(self.metadata, str):
            raise TypeError(f"metadata_columns={self.metadata!r} is a str; pass a list of names")
        for name in self.metadata:
            if not isinstance(name, str):
                raise TypeError(f"metadata_columns holds {name!r}; pass a list of names")
            if name in (self.id, self.text):
                raise InvalidRequestError(f"metadata_columns names {name!r}, which is the id or the text; leave it out")

    def keeps(self, column: str) -> bool:
        """Whether a column is metadata that is kept."""
        return column not in (self.id, self.text) and (self.metadata is None or column in self.metadata)

    def check(self, name: str, header: Sequence[str], nested: Collection[str] | None = ()) -> None:
        """Check the columns of a table."""
        shown = ", ".join(map(repr, header)) or "none"
        for column, purpose in ((self.text, "the text"), (self.id, "the id")):
            if column not in header and (column, purpose) != ("id", "the id"):
                raise InvalidRequestError(f"{name} has no column {column!r} for {purpose}; its columns: {shown}")
        if len(set(header)) != len(header):
            raise InvalidRequestError(f"{name} names a column twice; its columns: {shown}")
        if self.metadata is None or nested is None:
            return
        if unknown := [column for column in self.metadata if column not in header and column not in nested]:
            raise InvalidRequestError(
                f"{name} has no column {', '.join(map(repr, unknown))} for metadata; its columns: {shown}"
            )
