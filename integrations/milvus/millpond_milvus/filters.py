"""A filter on metadata as a Milvus expression."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from millpond.errors import InvalidRequestError
from millpond.support.filters import Condition, Range, check_filter
from millpond.support.metadata import Scalar
from millpond_milvus.layout import FieldSchema

_SIGNS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_ELEMENTS = 4  # of a list, that are looked at
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
    """Every key must have its value, one of a list of values, or one in its range.

    A list in the metadata has its elements. A key that is a field of the collection, or in ``vectors``, is refused.
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
    for key, condition in check_filter(filter).items():
        if schema.json is None and (key in schema.reserved or key in vectors):
            raise InvalidRequestError(
                f"filter key {key!r} is a field of the collection, which hides metadata of this name; rename the key "
                "in the metadata, or pass a Milvus expression to match the field"
            )
        if isinstance(condition, Range):
            clauses.append(f"({_lies_in(_path(key, schema), condition)})")
        else:
            clauses.append("(" + " or ".join(_matches(key, value, schema) for value in condition) + ")")
    return " and ".join(clauses)


def is_exact(conditions: Mapping[str, Condition], *, lite: bool) -> bool:
    """Whether an expression matches no other rows.

    Milvus compares no times, and no list with a range or under a key that is no identifier; Lite takes True for 1, and
    False for 0.
    """
    return not any(
        isinstance(condition, Range) or not _is_name(key) or (lite and any(value in (0, 1) for value in condition))
        for key, condition in conditions.items()
    )


def one_of(field: str, values: Sequence[str]) -> str:
    """``field in [...]`` for a field of the schema."""
    return f"{field} in [{', '.join(map(_literal, values))}]"


def _matches(key: str, value: Scalar, schema: FieldSchema) -> str:
    path = _path(key, schema)
    equal = f"{path} == {_literal(value)}"
    if schema.json is not None:
        return f"{equal} or {_contains(path, value)}"
    if _is_name(key):
        return f"{equal} or {_contains(key, value)}"
    return _any_of(path, lambda place: f"{place} == {_literal(value)}")


def _lies_in(path: str, condition: Range) -> str:
    bounds: Mapping[str, object] = condition.texts if condition.of_times else condition.bounds
    return _any_of(
        path,
        lambda place: " and ".join(f"{place} {_SIGNS[word]} {_literal(bound)}" for word, bound in bounds.items()),
    )


def _any_of(path: str, test: Callable[[str], str]) -> str:
    """Whether the value of a path meets a test, or one of the first in a list there; any longer list matches."""
    places = [path, *(f"{path}[{index}]" for index in range(_ELEMENTS))]
    return " or ".join([*(f"({test(place)})" for place in places), f"exists {path}[{_ELEMENTS}]"])


def _is_name(key: str) -> bool:
    """Whether a key can be written as a field, which no part of an expression could be taken for."""
    return bool(_NAME.fullmatch(key)) and key.lower() not in _WORDS


def _path(key: str, schema: FieldSchema) -> str:
    return f"{schema.json or '$meta'}[{_quoted(key)}]"


def _contains(path: str, value: Scalar) -> str:
    if not isinstance(value, str) and value < 0:  # Lite's parser accepts a minus sign in a list, but not in an argument
        return f"json_contains_any({path}, [{_literal(value)}])"
    return f"json_contains({path}, {_literal(value)})"


def _literal(value: object) -> str:
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    # Not json.dumps: Milvus does not decode \\u, and needs no other character escaped.
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f'"{text}"'
