"""A filter on metadata as a condition of LanceDB: every row lists what a dict can ask for in its column ``labels``."""

import hashlib
import json
from collections.abc import Iterable, Mapping

from millpond.errors import InvalidRequestError
from millpond.support.metadata import Scalar, check_filter


def to_condition(filter: Mapping[str, object] | str | None) -> str:
    """Every key must have its value, or one of a list of values; a condition in SQL is passed on."""
    if filter is None or isinstance(filter, str):
        return filter or ""
    if not isinstance(filter, Mapping):
        kind = type(filter).__name__
        raise InvalidRequestError(f"filter is of type {kind}; pass a dict of metadata, or a condition in SQL as a str")
    wanted = ([label(key, value) for value in values] for key, values in check_filter(filter).items())
    return " AND ".join(f"array_has_any(labels, [{quoted(each)}])" for each in wanted)


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
