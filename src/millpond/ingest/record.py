"""Record: one text to ingest, with its database id and content hash."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.support.metadata import check_str, json_object

NAMESPACE = uuid.UUID("c4e431ac-b6db-43ba-8435-74c9cee587c4")
"""The UUIDv5 namespace of every point that millpond writes."""

MAX_ID_BYTES = 4096

_NAMESPACE_BYTES = NAMESPACE.bytes
_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
_CONTENT_CHARS = 1 << 20  # of a line that held no record: most are kept whole, so that they can be taken again


@dataclass(frozen=True)
class Record:
    """One text with its id and metadata, valid from construction.

    Attributes:
        id: Not empty, at most 4096 bytes of UTF-8, no NUL. A record with the same id replaces this one.
        text: The text to embed; may be empty (:func:`~millpond.ingest.ingest` leaves out blank ones by default).
        metadata: str keys; values that JSON has, and dates, Decimal, UUID, paths, sets and numpy's values, which are
            stored as ISO 8601, numbers, str and lists. The record has a copy, as JSON.
        chunk: Number of this piece of a longer text, whose id it has: from 0. A text that was not cut is piece 0.

    Raises:
        InvalidRequestError: A field that no database can store.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    chunk: int = 0

    def __post_init__(self) -> None:
        if not (type(self.id) is type(self.text) is str and self.text.isascii()):
            for name in ("id", "text"):
                check_str(name, getattr(self, name))
                object.__setattr__(self, name, str.__str__(getattr(self, name)))  # of numpy's str, Python's
        if not (0 < len(self.id) <= MAX_ID_BYTES and self.id.isascii() and "\0" not in self.id):
            _check_id(self.id)
        if type(self.metadata) is not dict and not isinstance(self.metadata, Mapping):
            raise InvalidRequestError(f"metadata is a {type(self.metadata).__name__}; pass a dict")
        object.__setattr__(self, "metadata", json_object("metadata", self.metadata))
        if type(self.chunk) is not int or self.chunk:
            check_int("chunk", self.chunk, 0)


def _check_id(record_id: str) -> None:
    check_str("id", record_id)
    if not record_id:
        raise InvalidRequestError("id is empty; give every record its own id")
    if "\0" in record_id:
        raise InvalidRequestError(f"id={record_id!r} holds a NUL character; leave it out")
    if (size := len(record_id.encode())) > MAX_ID_BYTES:
        raise InvalidRequestError(f"id={record_id[:40]!r}... has {size} bytes; at most {MAX_ID_BYTES} are stored")


def check_int(name: str, value: object, least: int = 1) -> None:
    """Raise InvalidRequestError for an argument that is no int, or less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequestError(f"{name}={value!r} must be an int from {least}")


def point_id(record_id: str, chunk: int = 0) -> str:
    """The database id of a record's chunk: a UUIDv5, the same for every model, so that re-ingesting replaces rows.

    The name hashed in :data:`NAMESPACE` is the record's id; for a chunk other than 0, NUL and the chunk's number follow
    (an id holds no NUL, so no two chunks share a name).

    Args:
        record_id: The record's id.
        chunk: The number of the chunk, from 0.

    Returns:
        The UUID, as ``xxxxxxxx-xxxx-5xxx-xxxx-xxxxxxxxxxxx``.

    Raises:
        InvalidRequestError: No str that UTF-8 can encode, or a number below 0.
    """
    check_str("record_id", record_id)
    if type(chunk) is not int or chunk:
        check_int("chunk", chunk, 0)
    return _uuid5(record_id if chunk == 0 else f"{record_id}\0{chunk}")


def point_ids(records: Iterable[Record]) -> list[str]:
    """:func:`point_id` of records, whose ids and numbers are known to be valid."""
    return [_uuid5(each.id if each.chunk == 0 else f"{each.id}\0{each.chunk}") for each in records]


def _uuid5(name: str) -> str:
    """As ``str(uuid.uuid5(NAMESPACE, name))``, in a quarter of its time."""
    digest = hashlib.sha1(_NAMESPACE_BYTES + name.encode(), usedforsecurity=False).hexdigest()
    return f"{digest[:8]}-{digest[8:12]}-5{digest[13:16]}-{_VARIANT[digest[16]]}{digest[17:20]}-{digest[20:32]}"


def content_hash(text: str) -> str:
    """SHA-256 of the text's UTF-8: stored with every record, and the id of a record without one.

    Args:
        text: The text.

    Returns:
        64 hexadecimal digits.

    Raises:
        InvalidRequestError: No str that UTF-8 can encode.
    """
    check_str("text", text)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Rejected:
    r"""A line, row, file or item that holds no record.

    Attributes:
        where: Where it begins: ``path:line``, the path of a file in a folder, or the number of an item.
        reason: Why it holds none.
        content: The line or row as it is in the source, for a dead-letter file: JSON, or a row's own text; cut after
            2**20 characters. Bytes that are not UTF-8 are written as ``\xNN``. None of a file or another object.
        record_id: The id, if that much could be read; of a file in a folder its path.
        parts: Whether records whose ids are ``record_id``, ``#`` and more may be of it, as of a file.
        lines: How many lines of the source it takes, from ``where`` on.
    """

    where: str
    reason: str
    content: str | None = None
    record_id: str | None = None
    parts: bool = False
    lines: int = 1

    def __post_init__(self) -> None:
        for name in ("where", "reason", "content", "record_id"):
            text = getattr(self, name)
            if text is not None and not text.isascii():  # a path may hold bytes that no file and no log can store
                object.__setattr__(self, name, text.encode(errors="backslashreplace").decode())
        if self.content is not None and len(self.content) > _CONTENT_CHARS:
            object.__setattr__(self, "content", self.content[:_CONTENT_CHARS])
