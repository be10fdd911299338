"""A filter on metadata as Qdrant's own."""

from __future__ import annotations

import re
from collections.abc import Mapping

from qdrant_client import models

from millpond.errors import InvalidRequestError
from millpond.ingest.payload import Payload
from millpond.ingest.search import Scalar, check_filter

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_EXACT_FLOAT = 1 << 53  # from here on, a range (of floats) would match an int's neighbours


def to_filter(wanted: Mapping[str, object] | models.Filter | None, form: Payload) -> models.Filter | None:
    """Every key must hold its value, or one of its list; a number matches as int or float, a list if it has the value.

    Raises:
        InvalidRequestError: A filter of another database, or a key that Qdrant cannot spell.
    """
    if wanted is None or isinstance(wanted, models.Filter):
        return wanted
    if not isinstance(wanted, Mapping):
        raise InvalidRequestError(
            f"filter is of type {type(wanted).__name__}; pass a dict of metadata, or a qdrant_client.models.Filter"
        )
    must: list[models.Condition] = []
    for key, values in check_filter(wanted).items():
        path = _path(key, form)
        must.append(models.Filter(should=[_condition(path, value) for value in values]))
    return models.Filter(must=must) if must else None


def _path(key: str, form: Payload) -> str:
    if '"' in key:
        raise InvalidRequestError(f"filter key {key!r} holds a quote, which no path of Qdrant can; rename the key")
    name = key if _PLAIN_KEY.fullmatch(key) else f'"{key}"'
    return name if form == "llama_index" else f"metadata.{name}"


def _condition(path: str, value: Scalar) -> models.FieldCondition:
    if isinstance(value, float) or (not isinstance(value, str | bool) and abs(value) < _EXACT_FLOAT):
        return models.FieldCondition(key=path, range=models.Range(gte=value, lte=value))
    return models.FieldCondition(key=path, match=models.MatchValue(value=value))
