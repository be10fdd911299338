"""Record: one text to ingest, with its database id and content hash."""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millpond.errors import InvalidRequestError

NAMESPACE = uuid.UUID("c4e431ac-b6db-43ba-8435-74c9cee587c4")
"""The UUIDv5 namespace of every point that millpond writes."""

MAX_ID_BYTES = 4096
_MAX_DEPTH = 32
_INT64 = 1 << 63


@dataclass(frozen=True)
class Record:
    """One text with its id and metadata, valid from construction.

    Attributes:
        id: Not empty, at most 4096 bytes of UTF-8, no NUL. A record with the same id replaces this one.
        text: The text to embed; may be empty.
        metadata: JSON values: str keys; str, bool, int (64 bits), finite float, None, lists and dicts of these.

    Raises:
        InvalidRequestError: A field that no database can store.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_str("id", self.id)
        if not self.id:
            raise InvalidRequestError("id is empty; give every record its own id")
        if "\0" in self.id:
            raise InvalidRequestError(f"id={self.id!r} holds a NUL character; leave it out")
        if (size := len(self.id.encode())) > MAX_ID_BYTES:
            raise InvalidRequestError(f"id={self.id[:40]!r}... has {size} bytes; at most {MAX_ID_BYTES} are stored")
        _check_str("text", self.text)
        if not isinstance(self.metadata, Mapping):
            raise InvalidRequestError(f"metadata is a {type(self.metadata).__name__}; pass a dict")
        _check_json("metadata", self.metadata, depth=0)


def point_id(record_id: str, chunk: int = 0) -> str:
    """The database id of a record's chunk: a UUIDv5, the same for every model, so that re-ingesting replaces rows.

    The name hashed in :data:`NAMESPACE` is the record's id; for a chunk other than 0, NUL and the chunk's number follow
    (an id holds no NUL, so no two chunks share a name).
    """
    _check_str("record_id", record_id)
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 0:
        raise InvalidRequestError(f"chunk={chunk!r} must be an int from 0")
    return str(uuid.uuid5(NAMESPACE, record_id if chunk == 0 else f"{record_id}\0{chunk}"))


def content_hash(text: str) -> str:
    """SHA-256 of the text's UTF-8, in hex: stored with every record, and the id of a record without one."""
    _check_str("text", text)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_str(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is {_describe(value)}; it must be a str")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{name} holds a lone surrogate at character {error.start}, which no encoding can store"
            ) from None


def _check_json(path: str, value: object, *, depth: int) -> None:
    if isinstance(value, str):
        _check_str(path, value)
    elif value is None or isinstance(value, bool):
        return
    elif isinstance(value, int):
        if not -_INT64 <= value < _INT64:
            raise InvalidRequestError(f"{path}={value} does not fit 64 bits; store it as a str")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequestError(f"{path}={value} is not JSON; store a finite number or None")
    elif depth == _MAX_DEPTH:
        raise InvalidRequestError(f"metadata is nested deeper than {_MAX_DEPTH} levels; store it as a JSON str")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_str(f"a key of {path}", key)
            _check_json(f"{path}[{key!r}]", item, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(f"{path}[{index}]", item, depth=depth + 1)
    else:
        raise InvalidRequestError(
            f"{path} is {_describe(value)}; metadata takes str, bool, int, float, None, list and dict"
        )


def _describe(value: object) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
