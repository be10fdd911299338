"""A record as metadata of Chroma, and a filter on metadata as a ``where`` of Chroma.

Chroma's metadata has str, numbers, bools and lists of str. What a record has beside them is JSON in one field, and the
values in it that a filter can name are labels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, content_hash
from millpond.support.filters import Condition, Range, check_filter, time_of
from millpond.support.metadata import Scalar

_OWN = "millpond:"
ID, HASH, REST, LABELS = (f"{_OWN}{name}" for name in ("id", "content_hash", "metadata", "labels"))
_RESERVED = (_OWN, "chroma:", "$", "#")  # what keys of Chroma cannot begin with, or must not
_INT64, _EXACT = 1 << 63, 1 << 53


def to_fields(record: Record) -> dict[str, Any]:
    """The metadata of Chroma for a record, without its text."""
    metadata = record.metadata
    plain = {key: value for key, value in metadata.items() if _is_plain(key, value)}
    rest = {key: value for key, value in metadata.items() if key not in plain}
    fields = {ID: record.id, HASH: content_hash(record.text), **plain}
    if rest:
        fields[REST] = json.dumps(rest)
    if found := sorted(set(_labels(metadata, rest))):
        fields[LABELS] = found
    return fields


def to_filtered(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the fields that a filter looks at."""
    return {key: value for key, value in fields.items() if key not in (HASH, REST)}


def to_metadata(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The record's metadata; its keys are in another order."""
    metadata = {key: value for key, value in fields.items() if not key.startswith(_OWN)}
    return metadata | json.loads(fields[REST]) if REST in fields else metadata


def to_where(filter: Mapping[str, object] | str | None) -> str:
    """A ``where`` as JSON: every key must have its value, one of a list of values, or one in its range.

    Args:
        filter: A dict of metadata, or a ``where`` as JSON, which is passed on.

    Returns:
        The JSON; empty for no condition.

    Raises:
        InvalidRequestError: The filter is of another type, or no JSON object.
    """
    if filter is None:
        return ""
    if isinstance(filter, str):
        try:
            native = json.loads(filter)
        except ValueError:
            native = None
        if not isinstance(native, dict):
            raise InvalidRequestError(f"filter={filter!r} is no JSON object; write Chroma's where as JSON, or a dict")
        return filter if native else ""
    if not isinstance(filter, Mapping):
        kind = type(filter).__name__
        raise InvalidRequestError(f"filter is of type {kind}; pass a dict of metadata, or Chroma's where as a JSON str")
    clauses = [_clause(key, condition) for key, condition in check_filter(filter).items()]
    return json.dumps(_joined("$and", clauses)) if clauses else ""


def is_exact(condition: Condition) -> bool:
    """Whether a ``where`` matches no other rows: it compares an int with a float as ints, and knows no times."""
    return not isinstance(condition, Range) and all(
        isinstance(value, str) or (float(value).is_integer() and abs(value) < _EXACT) for value in condition
    )


def _clause(key: str, condition: Condition) -> dict[str, Any]:
    plain = _is_key(key)
    if not isinstance(condition, Range):
        return _joined("$or", [clause for value in condition for clause in _equal(key, value, plain)])
    elsewhere = {LABELS: {"$contains": json.dumps([key])}}
    if condition.of_times or not plain:
        return elsewhere
    return _joined("$or", [_joined("$and", [*_bounds(key, condition)]), elsewhere])


def _equal(key: str, value: Scalar, plain: bool) -> Iterator[dict[str, Any]]:
    if plain:
        yield {key: {"$eq": value}}
        if isinstance(value, str):
            yield {key: {"$contains": value}}
    yield {LABELS: {"$contains": _label(key, value)}}


def _bounds(key: str, condition: Range) -> Iterator[dict[str, Any]]:
    """Bounds that hold every number of the range: Chroma cuts the fraction of a bound that it compares with an int."""
    for word, bound in condition.bounds.items():
        whole = math.floor(bound) if word.startswith("g") else math.ceil(bound)
        yield {key: {f"${word[0]}te": whole if -_INT64 <= whole < _INT64 else float(bound)}}


def _joined(word: str, clauses: list[dict[str, Any]]) -> dict[str, Any]:
    return clauses[0] if len(clauses) == 1 else {word: clauses}


def _is_key(key: str) -> bool:
    return key != "" and not key.startswith(_RESERVED)


def _is_plain(key: str, value: object) -> bool:
    """Whether Chroma stores the value under its key."""
    texts = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    return _is_key(key) and (isinstance(value, Scalar) or bool(texts))


def _labels(metadata: Mapping[str, Any], rest: Mapping[str, Any]) -> Iterator[str]:
    """A label of each key that a range has to look at, and of each value in the rest that a filter can name."""
    for key, value in metadata.items():
        items = value if isinstance(value, list) else [value]
        if key in rest:
            yield from (_label(key, item) for item in items if isinstance(item, Scalar))
        if key in rest or any(isinstance(item, str) and time_of(item) for item in items):
            yield json.dumps([key])


def _label(key: str, value: Scalar) -> str:
    """The same for values that are equal: 1 and 1.0, but not True. A long one is a hash."""
    whole = isinstance(value, float) and value.is_integer()
    text = json.dumps([key, int(value) if whole else value])
    return text if len(text) <= 128 else hashlib.sha256(text.encode()).hexdigest()
