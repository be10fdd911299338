"""Record: one text to ingest, with its database id and content hash."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.metadata import check_str, json_object

NAMESPACE = uuid.UUID("c4e431ac-b6db-43ba-8435-74c9cee587c4")
"""The UUIDv5 namespace of every point that millpond writes."""

MAX_ID_BYTES = 4096


@dataclass(frozen=True)
class Record:
    """One text with its id and metadata, valid from construction.

    Attributes:
        id: Not empty, at most 4096 bytes of UTF-8, no NUL. A record with the same id replaces this one.
        text: The text to embed; may be empty (:func:`~millpond.ingest.ingest` leaves out blank ones by default).
        metadata: str keys; values that JSON has, and dates, Decimal, UUID, paths, sets and numpy's values, which are
            stored as ISO 8601, numbers, str and lists. The record has a copy, as JSON.

    Raises:
        InvalidRequestError: A field that no database can store.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("id", "text"):
            check_str(name, getattr(self, name))
            object.__setattr__(self, name, str.__str__(getattr(self, name)))  # of numpy's str, Python's
        if not self.id:
            raise InvalidRequestError("id is empty; give every record its own id")
        if "\0" in self.id:
            raise InvalidRequestError(f"id={self.id!r} holds a NUL character; leave it out")
        if (size := len(self.id.encode())) > MAX_ID_BYTES:
            raise InvalidRequestError(f"id={self.id[:40]!r}... has {size} bytes; at most {MAX_ID_BYTES} are stored")
        if not isinstance(self.metadata, Mapping):
            raise InvalidRequestError(f"metadata is a {type(self.metadata).__name__}; pass a dict")
        object.__setattr__(self, "metadata", json_object("metadata", self.metadata))


def point_id(record_id: str, chunk: int = 0) -> str:
    """The database id of a record's chunk: a UUIDv5, the same for every model, so that re-ingesting replaces rows.

    The name hashed in :data:`NAMESPACE` is the record's id; for a chunk other than 0, NUL and the chunk's number follow
    (an id holds no NUL, so no two chunks share a name).
    """
    check_str("record_id", record_id)
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 0:
        raise InvalidRequestError(f"chunk={chunk!r} must be an int from 0")
    return str(uuid.uuid5(NAMESPACE, record_id if chunk == 0 else f"{record_id}\0{chunk}"))


def content_hash(text: str) -> str:
    """SHA-256 of the text's UTF-8, in hex: stored with every record, and the id of a record without one."""
    check_str("text", text)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A line, row, file or item that holds no record.

    Attributes:
        where: ``path:line``, the path of a file in a folder, or the number of an item.
        reason: Why it holds none.
    """

    where: str
    reason: str
