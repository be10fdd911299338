"""A record as a Qdrant payload, a payload as a record, and a filter on metadata as one on payloads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from qdrant_client import models

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, content_hash
from millpond.ingest.sinks.fields import (
    LLAMA_INDEX_KEYS,
    FieldLayout,
    is_own_row,
    llama_index_fields,
    node_metadata,
    read_llama_index,
)
from millpond.support.filters import Condition, Range, check_filter
from millpond.support.metadata import Scalar

# The key that holds the text, from the form that no other could be taken for.
_TEXT_KEYS: Mapping[FieldLayout, str] = {"llama_index": "_node_content", "langchain": "page_content", "plain": "text"}

IDENTITY = ["id", "doc_id", "chunk", "_node_type", "content_hash"]
"""The keys that :func:`identity_of` reads: not the text, nor the metadata."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_UNWRITABLE = {'"': "quote", "\\": "backslash"}  # a path has no escapes
_EXACT_FLOAT = 1 << 53  # from this size on, a range (of floats) would also match neighbouring ints


def identity_of(payload: Mapping[str, Any], point: str) -> tuple[str, str]:
    """Id and content hash of a stored point; of a framework's own its id and no hash.

    A framework's point may have any of the keys: a LlamaIndex node its metadata's.
    """
    if "_node_type" in payload:
        record_id = str(payload.get("doc_id"))
        own = is_own_row(record_id, point, payload)
    else:
        record_id = str(payload.get("id", point))
        own = "content_hash" in payload
    return (record_id if own else point), str(payload["content_hash"]) if own and "content_hash" in payload else ""


def payload_of(record: Record, point: str, form: FieldLayout) -> dict[str, Any]:
    """The payload of a point."""
    if form == "llama_index":
        return llama_index_fields(record, point, text_inside=True)
    return {
        "id": record.id,
        _TEXT_KEYS[form]: record.text,
        "metadata": dict(record.metadata),
        "content_hash": content_hash(record.text),
    }


def record_fields(payload: Mapping[str, Any], point: str, form: FieldLayout) -> tuple[str, str, dict[str, Any]]:
    """Id, text and metadata of a stored point. The id of a point that a framework wrote is the point's own.

    A point of another form than the collection's, as another framework writes it, is read as well.
    """
    written = next((known for known in (form, *_TEXT_KEYS) if _TEXT_KEYS[known] in payload), form)
    if written == "llama_index":
        return read_llama_index(payload, point)
    text = payload[_TEXT_KEYS[written]]
    return str(payload.get("id", point)), str(text), dict(payload.get("metadata") or {})


def content_of(payload: Mapping[str, Any], point: str, form: FieldLayout) -> tuple[str, dict[str, Any]]:
    """Text and metadata of a stored point, to compare; both are empty if they cannot be read."""
    try:
        _, text, metadata = record_fields(payload, point, form)
    except (LookupError, TypeError, ValueError):
        return "", {}
    return text, node_metadata(metadata, payload) if _TEXT_KEYS["llama_index"] in payload else metadata


def to_filter(filter: Mapping[str, object] | models.Filter | None, form: FieldLayout) -> models.Filter | None:
    """Every key must have its value, one of a list of values, or one in its range.

    A number matches as int or float; a list in the metadata matches if it contains the value.
    """
    if filter is None or isinstance(filter, models.Filter):
        return filter
    if not isinstance(filter, Mapping):
        raise InvalidRequestError(
            f"filter is of type {type(filter).__name__}; pass a dict of metadata, or a qdrant_client.models.Filter"
        )
    must: list[models.Condition] = []
    for key, wanted in check_filter(filter).items():
        path = payload_path(key, form)
        if isinstance(wanted, Range):
            must.append(models.FieldCondition(key=path, range=_range(wanted)))
        else:
            must.append(models.Filter(should=[_condition(path, value) for value in wanted]))
    return models.Filter(must=must) if must else None


def is_exact(conditions: Mapping[str, Condition]) -> bool:
    """Whether a native filter matches no other points: Qdrant reads more forms of times, and compares floats."""
    return all(not isinstance(condition, Range) or condition.exact for condition in conditions.values())


def has_condition(filter: models.Filter) -> bool:
    """Whether a filter has a condition; one without matches every point.

    Filters inside it are conditions only if they have one themselves. An alternative without a condition makes the
    whole ``should`` match every point.
    """
    alternatives = _conditions(filter.should)
    if any(_conditions(filter.must)) or any(_conditions(filter.must_not)) or (alternatives and all(alternatives)):
        return True
    if filter.min_should is None:
        return False
    choices = _conditions(filter.min_should.conditions)
    return any(choices) and choices.count(False) < filter.min_should.min_count


def _conditions(clause: list[models.Condition] | models.Condition | None) -> list[bool]:
    """For each condition of a clause: ``False`` if it is a filter without a condition."""
    members = [] if clause is None else clause if isinstance(clause, list) else [clause]
    return [not isinstance(member, models.Filter) or has_condition(member) for member in members]


def payload_path(key: str, form: FieldLayout, *, what: str = "filter") -> str:
    """The path of a metadata key in the payload; ``what`` names the argument if no path can hold it."""
    if unwritable := next((name for sign, name in _UNWRITABLE.items() if sign in key), None):
        raise InvalidRequestError(
            f"{what} key {key!r} holds a {unwritable}, which no path of Qdrant can; rename the key"
        )
    if form == "llama_index" and key in LLAMA_INDEX_KEYS:
        raise InvalidRequestError(
            f"{what} key {key!r} is a field of LlamaIndex's store, which hides metadata of this name; rename the key "
            "in the metadata, or pass a qdrant_client.models.Filter to match the store's field"
        )
    name = key if _PLAIN_KEY.fullmatch(key) else f'"{key}"'
    return name if form == "llama_index" else f"metadata.{name}"


def _range(wanted: Range) -> models.Range | models.DatetimeRange:
    if wanted.of_times:
        return models.DatetimeRange(**wanted.bounds)
    if wanted.exact:
        return models.Range(**wanted.bounds)
    outward = {"g": -math.inf, "l": math.inf}
    return models.Range(
        **{f"{word[0]}te": math.nextafter(bound, outward[word[0]]) for word, bound in wanted.bounds.items()}
    )


def _condition(path: str, value: Scalar) -> models.FieldCondition:
    if isinstance(value, float) or (not isinstance(value, str | bool) and abs(value) < _EXACT_FLOAT):
        return models.FieldCondition(key=path, range=models.Range(gte=value, lte=value))
    return models.FieldCondition(key=path, match=models.MatchValue(value=value))
