"""Metadata as JSON: what a database can store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from millpond.errors import InvalidRequestError

Scalar = str | int | float | bool

_MAX_DEPTH = 32
_INT64 = 1 << 63


def json_object(name: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    """A mapping as a JSON object of its own: later changes of ``value`` do not change it.

    ========================================= ==============================================================
    str, bool, int (64 bits), float, None     themselves
    list, tuple, dict                         lists and objects
    datetime, date, time                      ISO 8601; numpy's ``datetime64`` too
    timedelta                                 seconds
    Decimal                                   int if it is written without a fraction, else float
    UUID                                      str
    numpy's scalars and arrays                Python's numbers, str and lists
    ========================================= ==============================================================
    """
    return _object(name, value, 0)


def json_value(name: str, value: object) -> Any:
    """One value as JSON, as :func:`json_object` converts it."""
    return _value(name, value, 1)


def check_str(name: str, value: object) -> None:
    """Raise InvalidRequestError for anything but a str that UTF-8 can encode."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is {describe(value)}; it must be a str")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{name} holds a lone surrogate at character {error.start}, which no encoding can store"
            ) from None


def describe(value: object) -> str:
    """A value of a wrong type in an error message."""
    return "missing" if value is None else f"of type {type(value).__name__}"


def _object(name: str, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    if depth == _MAX_DEPTH:
        raise InvalidRequestError(f"metadata is nested deeper than {_MAX_DEPTH} levels; store it as a JSON str")
    result: dict[str, Any] = {}
    for given_key, item in value.items():
        if type(given_key) is str and given_key.isascii():
            kind = type(item)
            # As _is_plain, without a call for each value: nearly all, and they need no name for errors.
            if (
                (kind is str and (item.isascii() or _has_encoding(item)))
                or (kind is int and -_INT64 <= item < _INT64)
                or item is None
                or kind is bool
                or (kind is float and math.isfinite(item))
            ):
                result[given_key] = item
                continue
        check_str(f"a key of {name}", given_key)
        result[str.__str__(given_key)] = _value(f"{name}[{given_key!r}]", item, depth + 1)
    return result


def _list(name: str, value: Sequence[Any], depth: int) -> list[Any]:
    if depth == _MAX_DEPTH:
        raise InvalidRequestError(f"metadata is nested deeper than {_MAX_DEPTH} levels; store it as a JSON str")
    return [
        item if _is_plain(item) else _value(f"{name}[{index}]", item, depth + 1) for index, item in enumerate(value)
    ]


def _value(name: str, value: Any, depth: int) -> Any:
    """``value`` as JSON; the types that derive from str, int or float, as numpy's, become these."""
    if _is_plain(value):
        return value
    match value:
        case str():
            check_str(name, value)
            return str.__str__(value)
        case int():
            return _integer(name, int(value))
        case float():
            return _float(name, float(value), value)
        case datetime() | date() | time() if value == value:  # pandas.NaT is a datetime that does not
            return value.isoformat()
        case timedelta() if value == value:
            return _float(name, value.total_seconds(), value)
        case Decimal():
            exponent = value.as_tuple().exponent
            if isinstance(exponent, int) and 0 <= exponent <= 18:
                return _integer(name, int(value))
            return _float(name, float(value) if value.is_finite() else math.nan, value)
        case UUID():
            return str(value)
        case Mapping():
            return _object(name, value, depth)
        case list() | tuple():
            return _list(name, value, depth)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # numpy is not imported for it
        return _array(name, value, depth)
    raise InvalidRequestError(f"{name} is {_described(value)}")


def _described(value: object) -> str:
    """A value that metadata cannot have, and what to store instead."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"of type {type(value).__name__}; decode it, or store base64 as a str"
    if isinstance(value, set | frozenset):
        return f"of type {type(value).__name__}; store sorted(value), a list"
    if value != value:
        return f"{value!r}, which is a missing value; store None, or leave the key out"
    return (
        f"{describe(value)}; metadata takes str, bool, int, float, None, list, dict, dates, Decimal, UUID and numpy's "
        "values: store str(value), or leave the key out"
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is JSON as it is."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii()) or _has_encoding(value)
    if kind is int:
        return bool(-_INT64 <= value < _INT64)
    if kind is float:
        return math.isfinite(value)
    return value is None or kind is bool


def _has_encoding(text: str) -> bool:
    """Whether UTF-8 can encode a text: it holds no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _array(name: str, value: Any, depth: int) -> Any:
    """A scalar or an array of numpy, or of a library with the same two attributes."""
    kind = getattr(value.dtype, "kind", "")
    if getattr(value, "ndim", 0):
        return _list(name, value.tolist() if kind in "biufU" else list(value), depth)
    if kind == "M" and value == value:
        return str(value)
    if kind == "f":
        return _float(name, float(value), value)
    plain = value.tolist()
    if kind in "Mm" or type(plain) is type(value):  # NaT, a timedelta64, or a type that Python has no word for
        raise InvalidRequestError(f"{name} is {value!r}; store a number, a str or None")
    return _value(name, plain, depth)


def _integer(name: str, value: int) -> int:
    if not -_INT64 <= value < _INT64:
        # Python refuses to write very long ints.
        shown = value if value.bit_length() < 1024 else f"an int of {value.bit_length()} bits"
        raise InvalidRequestError(f"{name}={shown} does not fit 64 bits; store it as a str")
    return value


def _float(name: str, value: float, given: object) -> float:
    if not math.isfinite(value):
        raise InvalidRequestError(f"{name}={given} is not JSON; store a finite number or None")
    return value
