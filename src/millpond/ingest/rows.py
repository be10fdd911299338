"""RowReader: an object of JSON, a row of a CSV or a dict as a record."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Integral
from typing import Any
from uuid import UUID

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, content_hash

logger = logging.getLogger(__name__)

METADATA_KEY = "metadata"


class RowReader:
    """Turns the rows of one source into records.

    Args:
        name: The source, for the log.
        id_column: Key of the id.
        text_column: Key of the text.
    """

    def __init__(self, name: str, *, id_column: str = "id", text_column: str = "text") -> None:
        self._name = name
        self._id_column = id_column
        self._text_column = text_column
        self._collisions: set[str] = set()

    def record(self, row: Mapping[Any, Any]) -> Record:
        """The record of a row.

        ``metadata`` is an object, and the keys other than id and text are metadata, too. Of a key that is in both, the
        value in ``metadata`` counts, and the log names the key once. A missing id becomes the text's content hash.

        Raises:
            InvalidRequestError: The row holds no record.
        """
        fields = dict(row)
        identity, text = fields.pop(self._id_column, None), fields.pop(self._text_column, None)
        metadata = fields.pop(METADATA_KEY, None)
        if metadata is not None and not isinstance(metadata, Mapping):
            raise InvalidRequestError(f"metadata is a {type(metadata).__name__}; pass a dict")
        if fields and metadata:
            self._note_collisions(fields.keys() & metadata.keys())
        return make_record(identity, text, {**fields, **(metadata or {})})

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
    """A record; without an id it gets the text's content hash, and an int or a UUID becomes a str.

    Raises:
        InvalidRequestError: A field that no database can store.
    """
    if identity is None:
        identity = content_hash(text)
    elif isinstance(identity, UUID) or (isinstance(identity, Integral) and not isinstance(identity, bool)):
        identity = str(int(identity) if isinstance(identity, Integral) else identity)
    return Record(identity, text, metadata)
