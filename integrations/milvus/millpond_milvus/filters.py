"""A filter on metadata as a Milvus expression."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence

from millpond.errors import InvalidRequestError
from millpond.support.metadata import Scalar, check_filter
from millpond_milvus.layout import FieldSchema

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A key with such a name could be parsed as an operator, a function or a literal; two are fields of Lite's own.
_WORDS = frozenset(
    ["and", "or", "not", "in", "like", "exists", "is", "null", "true", "false", "iso", "interval", "_seq", "_partition"]
    + [f"{kind}_contains{which}" for kind in ("array", "json") for which in ("", "_all", "_any")]
    + ["array_length", "text_match", "phrase_match", "random_sample"]
)


def to_expression(
    filter: Mapping[str, object] | str | None, schema: FieldSchema, *, vectors: Collection[str] = ()
) -> str:
    """Every key must have its value, or one of a list of values.

    A list in the metadata matches if it contains the value; without a JSON field (the frameworks' schemas) only under a
    key that is an identifier. A key that is a field of the collection, or in ``vectors``, is refused.
    """
    if filter is None:
        return ""
    if isinstance(filter, str):
        return filter
    if not isinstance(filter, Mapping):
        raise InvalidRequestError(
            f"filter is of type {type(filter).__name__}; pass a dict of metadata, or a Milvus expression as a str"
        )
    clauses = []
    for key, values in check_filter(filter).items():
        if schema.json is None and (key in schema.reserved or key in vectors):
            raise InvalidRequestError(
                f"filter key {key!r} is a field of the collection, which hides metadata of this name; rename the key "
                "in the metadata, or pass a Milvus expression to match the field"
            )
        clauses.append("(" + " or ".join(_matches(key, value, schema) for value in values) + ")")
    return " and ".join(clauses)


def one_of(field: str, values: Sequence[str]) -> str:
    """``field in [...]`` for a field of the schema."""
    return f"{field} in [{', '.join(map(_literal, values))}]"


def _matches(key: str, value: Scalar, schema: FieldSchema) -> str:
    path = f"{schema.json or '$meta'}[{_quoted(key)}]"
    equal = f"{path} == {_literal(value)}"
    if schema.json is not None:
        return f"{equal} or {_contains(path, value)}"
    if _NAME.fullmatch(key) and key.lower() not in _WORDS:
        return f"{equal} or {_contains(key, value)}"
    return equal


def _contains(path: str, value: Scalar) -> str:
    if not isinstance(value, str) and value < 0:  # Lite's parser accepts a minus sign in a list, but not in an argument
        return f"json_contains_any({path}, [{_literal(value)}])"
    return f"json_contains({path}, {_literal(value)})"


def _literal(value: Scalar) -> str:
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    # Not json.dumps: Milvus does not decode \\u, and needs no other character escaped.
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f'"{text}"'
