"""A filter on metadata as a Qdrant filter."""

from __future__ import annotations

import re
from collections.abc import Mapping

from qdrant_client import models

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.fields import LLAMA_INDEX_KEYS, FieldLayout
from millpond.support.metadata import Scalar, check_filter

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_UNWRITABLE = {'"': "quote", "\\": "backslash"}  # a path has no escapes
_EXACT_FLOAT = 1 << 53  # from this size on, a range (of floats) would also match neighbouring ints


def to_filter(filter: Mapping[str, object] | models.Filter | None, form: FieldLayout) -> models.Filter | None:
    """Every key must have its value, or one of a list of values.

    A number matches as int or float; a list in the metadata matches if it contains the value.

    Raises:
        InvalidRequestError: A filter of another database, a key with a quote or backslash, which no path of Qdrant can
            hold, or one that LlamaIndex's store keeps for itself.
    """
    if filter is None or isinstance(filter, models.Filter):
        return filter
    if not isinstance(filter, Mapping):
        raise InvalidRequestError(
            f"filter is of type {type(filter).__name__}; pass a dict of metadata, or a qdrant_client.models.Filter"
        )
    must: list[models.Condition] = []
    for key, values in check_filter(filter).items():
        path = payload_path(key, form)
        must.append(models.Filter(should=[_condition(path, value) for value in values]))
    return models.Filter(must=must) if must else None


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
    """The path of a metadata key in the payload.

    Raises:
        InvalidRequestError: A key that no path can hold, or that LlamaIndex's store keeps for itself; ``what`` names
            the argument.
    """
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


def _condition(path: str, value: Scalar) -> models.FieldCondition:
    if isinstance(value, float) or (not isinstance(value, str | bool) and abs(value) < _EXACT_FLOAT):
        return models.FieldCondition(key=path, range=models.Range(gte=value, lte=value))
    return models.FieldCondition(key=path, match=models.MatchValue(value=value))
