"""A filter on metadata as a Milvus expression."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from millpond.errors import InvalidRequestError
from millpond.ingest.search import Scalar, check_filter
from millpond_milvus.schema import PayloadSchema

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A key of such a name could be read as an operator.
_WORDS = frozenset(
    ["and", "or", "not", "in", "like", "exists", "is", "null", "true", "false", "array_contains", "json_contains"]
)


def to_expression(wanted: Mapping[str, object] | str | None, schema: PayloadSchema) -> str:
    """Every key must hold its value, or one of its list; a list in the metadata matches if it has the value.

    Without a JSON field (the frameworks' schemas) a list matches only under a key that is a plain name.

    Raises:
        InvalidRequestError: A filter of another database, or a key that is a field of the schema.
    """
    if wanted is None:
        return ""
    if isinstance(wanted, str):
        return wanted
    if not isinstance(wanted, Mapping):
        raise InvalidRequestError(
            f"filter is of type {type(wanted).__name__}; pass a dict of metadata, or a Milvus expression as a str"
        )
    clauses = []
    for key, values in check_filter(wanted).items():
        if schema.json is None and key in schema.reserved:
            raise InvalidRequestError(
                f"filter key {key!r} is a field of the collection, not metadata; pass a Milvus expression instead"
            )
        clauses.append("(" + " or ".join(_matches(key, value, schema) for value in values) + ")")
    return " and ".join(clauses)


def one_of(field: str, values: Sequence[str]) -> str:
    """``field in [...]`` for a field of the schema."""
    return f"{field} in [{', '.join(map(_literal, values))}]"


def _matches(key: str, value: Scalar, schema: PayloadSchema) -> str:
    path = f"{schema.json or '$meta'}[{_quoted(key)}]"
    equal = f"{path} == {_literal(value)}"
    if schema.json is not None:
        return f"{equal} or {_contains(path, value)}"
    if _NAME.fullmatch(key) and key.lower() not in _WORDS:
        return f"{equal} or {_contains(key, value)}"
    return equal


def _contains(path: str, value: Scalar) -> str:
    if not isinstance(value, str) and value < 0:  # Lite's parser takes no sign for an argument, but one in a list
        return f"json_contains_any({path}, [{_literal(value)}])"
    return f"json_contains({path}, {_literal(value)})"


def _literal(value: Scalar) -> str:
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    # Not json.dumps: Milvus knows no \\u, and takes every other character as it is.
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f'"{text}"'
