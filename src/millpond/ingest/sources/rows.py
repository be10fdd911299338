"""Columns and RowReader: an object of JSON, a row of a table, a dict or a framework's document as a record."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any
from uuid import UUID

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected, content_hash
from millpond.ingest.sources.composed_text import ComposedText, compose
from millpond.support.cached_property import cached_property

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of a source's columns or keys."""

    id: str = "id"  # of the id. A table may lack it only if this is the default
    text: str | Sequence[str] = "text"  # of the text; several are joined by spaces
    template: str | None = None  # joins the columns that it names in braces
    metadata: Collection[str] | None = None  # those that are kept as metadata; `None`: all others

    def __post_init__(self) -> None:
        if self.id in self.texts:
            raise InvalidRequestError(f"id_column and text_column are both {self.id!r}; name two columns")
        if self.metadata is None:
            return
        if isinstance(self.metadata, str):
            raise TypeError(f"metadata_columns={self.metadata!r} is a str; pass a list of names")
        for name in self.metadata:
            if not isinstance(name, str):
                raise TypeError(f"metadata_columns holds {name!r}; pass a list of names")
            if name in (self.id, self.body):
                raise InvalidRequestError(f"metadata_columns names {name!r}, which is the id or the text; leave it out")

    @cached_property
    def composed(self) -> ComposedText | None:
        """How the text is made of several columns; ``None``: it is the value of one."""
        return compose(self.text, self.template)

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The columns that the text is made of."""
        return self.composed.names if self.composed else (self.text if isinstance(self.text, str) else self.text[0],)

    @property
    def body(self) -> str:
        """The text's own column: the last of them. The others stay metadata."""
        return self.texts[-1]

    def keeps(self, column: str) -> bool:
        """Whether a column is metadata that is kept."""
        return column not in (self.id, self.body) and (self.metadata is None or column in self.metadata)

    def check(self, name: str, header: Sequence[str], nested: Collection[str] | None = ()) -> None:
        """Check the columns of a table."""
        shown = ", ".join(map(repr, header)) or "none"
        for column, purpose in (*((each, "the text") for each in self.texts), (self.id, "the id")):
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


METADATA_KEY = "metadata"
_COLLISION = "the keys %s are both in metadata and beside it; the values in metadata are stored"


class RowReader:
    """Turns the rows of one source into records."""

    def __init__(self, name: str, columns: Columns | None = None, *, nested: bool = True) -> None:
        self._name = name
        self._columns = Columns() if columns is None else columns
        self._kept = None if self._columns.metadata is None else frozenset(self._columns.metadata)
        self._nested = nested
        self._composed = self._columns.composed
        self._noted: set[tuple[str, str]] = set()

    @property
    def composes(self) -> bool:
        """Whether a text is made of several columns."""
        return self._composed is not None

    def record(self, row: Mapping[Any, Any]) -> Record:
        """The record of a row.

        ``metadata`` is an object, and the keys other than id and text are metadata, too. If a key is in both, the value
        in ``metadata`` counts, and the log names the key once. A missing id becomes the text's content hash.
        """
        fields = dict(row)
        text = None if self._composed is None else self._compose(fields)
        identity, body = fields.pop(self._columns.id, None), fields.pop(self._columns.body, None)
        metadata = fields.pop(METADATA_KEY, None) if self._nested else None
        if metadata is not None and not isinstance(metadata, Mapping):
            raise InvalidRequestError(f"metadata is a {type(metadata).__name__}; pass a dict")
        if self._kept is not None:
            fields = self._select(fields)
            metadata = metadata if not metadata or METADATA_KEY in self._kept else self._select(metadata)
        if metadata and fields:
            self._note(_COLLISION, fields.keys() & metadata.keys())
            fields.update(metadata)
        text = body if self._composed is None else text
        return make_record(identity, text, fields if fields or metadata is None else metadata)

    def document(self, identity: Any, text: Any, metadata: Mapping[Any, Any]) -> Record:
        """The record of an object that has its id, text and metadata apart; its text is that of the last column."""
        if self._composed is not None and isinstance(metadata, Mapping):
            text = self._compose({**metadata, self._columns.body: text})
        keeps_all = self._kept is None or not isinstance(metadata, Mapping)
        return make_record(identity, text, metadata if keeps_all else self._select(metadata))

    def item(self, row: Mapping[Any, Any], where: str) -> Record | Rejected:
        """The record of a row, or the row as rejected."""
        try:
            return self.record(row)
        except InvalidRequestError as error:
            return self.rejected(row, where, str(error))

    def id_of(self, row: object) -> str | None:
        """The id of a row that holds no record, if it is a str or an int."""
        identity = row.get(self._columns.id) if isinstance(row, Mapping) else None
        if isinstance(identity, str):
            return str.__str__(identity) or None
        return str(identity) if type(identity) is int and identity.bit_length() < 1024 else None

    def rejected(self, row: object, where: str, reason: str) -> Rejected:
        """A row that holds no record, with its content if that is JSON."""
        try:
            content = json.dumps(row, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            content = None
        return Rejected(where=where, reason=reason, content=content, record_id=self.id_of(row))

    def _select(self, fields: Mapping[Any, Any]) -> dict[Any, Any]:
        assert self._kept is not None
        return {key: value for key, value in fields.items() if key in self._kept}

    def _compose(self, fields: Mapping[Any, Any]) -> str | None:
        """The text of a row that has several columns of it; some may be keys of its metadata."""
        assert self._composed is not None
        nested = fields.get(METADATA_KEY) if self._nested else None
        values = {**nested, **fields} if isinstance(nested, Mapping) else fields
        text = self._composed(values)
        if text is not None and (missing := [name for name in self._composed.names if name not in values]):
            self._note("a record lacks %s; its text is made of the others", missing)
        return text

    def _note(self, message: str, keys: Iterable[str]) -> None:
        """Log what is to be said about keys, once for each of them."""
        new = {key for key in keys if (message, key) not in self._noted}
        if new:
            self._noted |= {(message, key) for key in new}
            logger.warning("%s: %s", self._name, message % ", ".join(sorted(map(repr, new))))


def make_record(identity: Any, text: Any, metadata: Mapping[str, Any]) -> Record:
    """A record; without an id it gets the text's content hash, and an int or a UUID becomes a str."""
    if identity is None:
        identity = content_hash(text)
    elif type(identity) is str:
        pass
    elif isinstance(identity, UUID) or (isinstance(identity, Integral) and not isinstance(identity, bool)):
        identity = str(int(identity) if isinstance(identity, Integral) else identity)
    return Record(identity, text, metadata)


_NO_METADATA = "none"  # LlamaIndex's MetadataMode.NONE, a str: the text alone


def read_items(items: Iterable[Any], rows: RowReader) -> Generator[Record | Rejected, None, Any]:
    """A record, or a :class:`Rejected`, for each item."""
    for number, item in enumerate(items):
        yield item if type(item) is Record and not rows.composes else _record(item, rows, f"item {number}")


def _record(item: Any, rows: RowReader, where: str) -> Record | Rejected:
    if isinstance(item, Rejected) or (isinstance(item, Record) and not rows.composes):
        return item
    try:
        if isinstance(item, Record):
            return rows.document(item.id, item.text, item.metadata)
        if isinstance(item, Mapping):
            return rows.record(item)
        if hasattr(item, "page_content"):  # LangChain's Document
            return rows.document(getattr(item, "id", None), item.page_content, _metadata(item))
        if hasattr(item, "get_content") and (hasattr(item, "node_id") or hasattr(item, "id_")):
            # A node of LlamaIndex, a Document, or a NodeWithScore around one.
            identity = item.node_id if hasattr(item, "node_id") else item.id_
            return rows.document(identity, item.get_content(metadata_mode=_NO_METADATA), _metadata(item))
        reason = (
            f"is of type {type(item).__name__}; yield Record(id, text, metadata), or a dict with these keys, "
            "or a Document of LangChain, or a node of LlamaIndex"
        )
    except InvalidRequestError as error:
        reason = str(error)
    except Exception as error:  # of a value's own methods
        reason = f"{type(error).__name__}: {error}"
    if isinstance(item, Mapping):
        return rows.rejected(item, where, reason)
    return Rejected(where=where, reason=reason)


def _metadata(item: Any) -> Any:
    metadata = getattr(item, "metadata", None)
    return {} if metadata is None else metadata
