"""A filter on metadata as a condition of LanceDB: equal values are looked up in its column ``labels``."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping

from millpond.errors import InvalidRequestError
from millpond.support.filters import Condition, Range, check_filter
from millpond.support.metadata import Scalar

_SIGNS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_INT64 = 1 << 63


def to_condition(filter: Mapping[str, object] | str | None) -> str:
    """Every key must have its value, one of a list of values, or one in its range; a condition in SQL is passed on."""
    if filter is None or isinstance(filter, str):
        return filter or ""
    if not isinstance(filter, Mapping):
        kind = type(filter).__name__
        raise InvalidRequestError(f"filter is of type {kind}; pass a dict of metadata, or a condition in SQL as a str")
    return " AND ".join(_clause(key, condition) for key, condition in check_filter(filter).items())


def is_exact(key: str, condition: Condition) -> bool:
    """Whether the condition in SQL matches no other rows; its paths take ints and str only, and no empty key."""
    return not isinstance(condition, Range) or (
        key != "" and condition.exact and all(int(bound) == bound for bound in condition.bounds.values())
    )


def _clause(key: str, condition: Condition) -> str:
    if not isinstance(condition, Range):
        return f"array_has_any(labels, [{quoted(label(key, value) for value in condition)}])"
    if not key:
        return "true"
    path = "$." + json.dumps(key)
    if condition.of_times:
        return _exists(path, {_SIGNS[word]: json.dumps(text) for word, text in condition.texts.items()})
    whole = {}
    for word, bound in condition.bounds.items():
        near = max(-_INT64, min(_INT64, math.floor(bound) if word.startswith("g") else math.ceil(bound)))
        whole[_SIGNS[word] if near == bound else _SIGNS[word[:1] + "te"]] = str(near)
    clause = _exists(path, whole)
    if all(int(bound) == bound for bound in condition.bounds.values()):
        return clause
    # Of a list, any float may lie in the range.
    value, first = (quoted([each]) for each in (path, f"{path}[0]"))
    tests = (
        f"TRY_CAST(json_extract(metadata, {value}) AS DOUBLE) {_SIGNS[word]} {bound!r}"
        for word, bound in condition.bounds.items()
    )
    return f"{clause} AND ({' AND '.join(tests)} OR json_exists(metadata, {first}))"


def _exists(path: str, tests: Mapping[str, str]) -> str:
    """Whether the value at a path, or one in a list there, meets all tests."""
    joined = " && ".join(f"@ {sign} {bound}" for sign, bound in tests.items())
    return f"json_exists(metadata, {quoted([f'{path} ? ({joined})'])})"


def quoted(texts: Iterable[str]) -> str:
    """Literals in SQL, separated by commas."""
    return ", ".join("'" + text.replace("'", "''") + "'" for text in texts)


def labels(metadata: Mapping[str, object]) -> list[str]:
    """A label for each value of the metadata that a filter can name, and for each one in a list."""
    pairs = ((key, item) for key, value in metadata.items() for item in (value if isinstance(value, list) else [value]))
    return sorted({label(key, item) for key, item in pairs if isinstance(item, Scalar)})


def label(key: str, value: Scalar) -> str:
    """The same for values that are equal: 1 and 1.0, but not True. A long one is a hash."""
    whole = isinstance(value, float) and value.is_integer()
    text = json.dumps([key, int(value) if whole else value])
    return text if len(text) <= 128 else hashlib.sha256(text.encode()).hexdigest()
