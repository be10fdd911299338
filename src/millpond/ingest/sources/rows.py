"""RowReader: an object of JSON, a row of a table or a dict as a record."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from numbers import Integral
from typing import Any
from uuid import UUID

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected, content_hash
from millpond.ingest.sources.columns import Columns

logger = logging.getLogger(__name__)

METADATA_KEY = "metadata"


class RowReader:
    """Turns the rows of one source into records."""

    def __init__(self, name: str, columns: Columns | None = None, *, nested: bool = True) -> None:
        self._name = name
        self._columns = Columns() if columns is None else columns
        self._kept = None if self._columns.metadata is None else frozenset(self._columns.metadata)
        self._nested = nested
        self._collisions: set[str] = set()

    def record(self, row: Mapping[Any, Any]) -> Record:
        """The record of a row.

        ``metadata`` is an object, and the keys other than id and text are metadata, too. If a key is in both, the value
        in ``metadata`` counts, and the log names the key once. A missing id becomes the text's content hash.
        """
        fields = dict(row)
        identity, text = fields.pop(self._columns.id, None), fields.pop(self._columns.text, None)
        metadata = fields.pop(METADATA_KEY, None) if self._nested else None
        if metadata is not None and not isinstance(metadata, Mapping):
            raise InvalidRequestError(f"metadata is a {type(metadata).__name__}; pass a dict")
        if self._kept is not None:
            fields = self._select(fields)
            metadata = metadata if not metadata or METADATA_KEY in self._kept else self._select(metadata)
        if metadata and fields:
            self._note_collisions(fields.keys() & metadata.keys())
            fields.update(metadata)
        return make_record(identity, text, fields if fields or metadata is None else metadata)

    def document(self, identity: Any, text: Any, metadata: Mapping[Any, Any]) -> Record:
        """The record of an object that has its id, text and metadata apart."""
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

    def _note_collisions(self, keys: set[Any]) -> None:
        new = keys - self._collisions
        if new:
            self._collisions |= new
            logger.warning(
                "%s: the keys %s are both in metadata and beside it; the values in metadata are stored",
                self._name,
                ", ".join(sorted(map(repr, new))),
            )


def make_record(identity: Any, text: Any, metadata: Mapping[str, Any]) -> Record:
    """A record; without an id it gets the text's content hash, and an int or a UUID becomes a str."""
    if identity is None:
        identity = content_hash(text)
    elif type(identity) is str:
        pass
    elif isinstance(identity, UUID) or (isinstance(identity, Integral) and not isinstance(identity, bool)):
        identity = str(int(identity) if isinstance(identity, Integral) else identity)
    return Record(identity, text, metadata)
