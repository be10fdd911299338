"""Filters on metadata: values that are accepted, and ranges of numbers or of times."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.support.metadata import Scalar, check_str, json_value

Bound = int | float | datetime

_BOUNDS = ("gt", "gte", "lt", "lte")
_WORDS = "gt, gte, lt and lte"
_TIME = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?)?)?", re.ASCII)
_EXACT_FLOAT = 1 << 53  # from this size on, a float may stand for several ints
_DAY = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Range:
    """A range of numbers, or of times, which metadata has as str in ISO 8601; ``value in range`` tests one value.

    A number is in no range of times, a str in none of numbers, and a bool in neither. A date is its midnight, and a
    time without a zone is in UTC.

    Attributes:
        gt: What values are greater than.
        gte: What values are greater than, or equal to; a range has one of these two, or none.
        lt: What values are less than.
        lte: What values are less than, or equal to; a range has one of these two, or none.
    """

    gt: Bound | None = None
    gte: Bound | None = None
    lt: Bound | None = None
    lte: Bound | None = None

    @property
    def bounds(self) -> dict[str, Any]:
        """The bounds by their words, the lower one first."""
        return {word: bound for word in _BOUNDS if (bound := getattr(self, word)) is not None}

    @property
    def of_times(self) -> bool:
        """Whether the bounds are times."""
        return any(isinstance(bound, datetime) for bound in self.bounds.values())

    @property
    def exact(self) -> bool:
        """Whether all bounds are numbers below 2^53, which floats and ints of any size compare to in one way."""
        return all(not isinstance(bound, datetime) and abs(bound) < _EXACT_FLOAT for bound in self.bounds.values())

    @property
    def texts(self) -> dict[str, str]:
        """Bounds of str in code point order for a range of times: every time of the range is between them.

        A time may have a zone, so the bounds are a day wider; and they are for a database that knows no times.
        """
        lower = next((self.bounds[word] for word in ("gt", "gte") if word in self.bounds), None)
        upper = next((self.bounds[word] for word in ("lt", "lte") if word in self.bounds), None)
        return {"gte": _day_of(lower, -1, beyond="0"), "lt": _day_of(upper, 2, beyond=":")}  # ":" follows the digits

    def place(self, value: object) -> Any:
        """A value of metadata as it is compared to the bounds; ``None`` if it is not of their kind."""
        if self.of_times:
            return time_of(value) if isinstance(value, str) else None
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def among(self, places: Sequence[Any]) -> slice:
        """Which of a sorted list of places are in the range."""
        start, stop = 0, len(places)
        for word, bound in self.bounds.items():
            if word in ("gt", "gte"):
                start = (bisect_right if word == "gt" else bisect_left)(places, bound)
            else:
                stop = (bisect_left if word == "lt" else bisect_right)(places, bound)
        return slice(start, max(start, stop))

    def __contains__(self, value: object) -> bool:
        place = self.place(value)
        return place is not None and self.among([place]) == slice(0, 1)


Condition = tuple[Scalar, ...] | Range


def check_filter(conditions: Mapping[str, object]) -> dict[str, Condition]:
    """Check a filter on metadata: for every key a value, a list of values, or a range, converted as metadata is.

    Args:
        conditions: For each key a value, a list of which one must match, or a range: a dict with one or two of the
            words ``gt gte lt lte``. Bounds are numbers, or dates and times: objects, or str in ISO 8601.

    Returns:
        For each key, the accepted values (str, int, bool or finite float), or a :class:`Range`.

    Raises:
        InvalidRequestError: A key that is not a str, an empty list, a value of another type, or a range that has
            another word, no bound, bounds of two kinds, or nothing in it.
    """
    result: dict[str, Condition] = {}
    for key, condition in conditions.items():
        if not isinstance(key, str):
            raise InvalidRequestError(f"filter key {key!r} is not a str")
        check_str("a filter key", key)
        name = f"filter[{key!r}]"
        if isinstance(condition, Range):
            condition = condition.bounds
        result[key] = _range(name, condition) if isinstance(condition, Mapping) else _values(name, condition)
    return result


def matches_filter(metadata: Mapping[str, Any], conditions: Mapping[str, Condition]) -> bool:
    """Whether metadata has for every key one of its values, or one in its range.

    Args:
        metadata: Metadata as JSON; a list has each of its elements.
        conditions: The conditions that :func:`check_filter` returns.

    Returns:
        Whether it does. A bool equals no number.
    """
    for key, condition in conditions.items():
        stored = metadata.get(key)
        if not any(_meets(value, condition) for value in (stored if isinstance(stored, list) else [stored])):
            return False
    return True


def no_match(filter: Mapping[str, Any]) -> str:
    """Why a search with a filter found nothing."""
    shown = json.dumps(filter, ensure_ascii=False)
    return f"no record matches the filter {shown}; a number in quotes is a str, and matches no number"


def time_of(text: str) -> datetime | None:
    """The time that a str in ISO 8601 names, in UTC if it has no zone; ``None`` for any other str."""
    if not _TIME.fullmatch(text):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:  # February 30
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def _meets(value: object, condition: Condition) -> bool:
    if isinstance(condition, Range):
        return value in condition
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in condition)


def _values(name: str, condition: object) -> tuple[Scalar, ...]:
    # As the metadata was stored: dates as ISO 8601, numpy's numbers as Python's.
    value = json_value(name, condition)
    values = tuple(value) if isinstance(value, list) else (value,)
    if not values:
        raise InvalidRequestError(f"{name} is an empty list, which nothing matches; leave the key out")
    for item in values:
        if not isinstance(item, str | bool | int | float):
            raise InvalidRequestError(
                f"{name} holds {item!r}; pass a str, int, bool, float or a list of these, a range like "
                "{'gte': 2020, 'lt': 2024}, or one of the database's own filters instead of the dict"
            )
    return values


def _range(name: str, condition: Mapping[Any, object]) -> Range:
    if unknown := [word for word in condition if word not in _BOUNDS]:
        raise InvalidRequestError(
            f"{name} has the word {unknown[0]!r}; a range has {_WORDS}, like {{'gte': 2020, 'lt': 2024}}"
        )
    if not condition:
        raise InvalidRequestError(f"{name} is an empty dict; a range has one or two of {_WORDS}, or leave the key out")
    for one, other in (("gt", "gte"), ("lt", "lte")):
        if one in condition and other in condition:
            raise InvalidRequestError(f"{name} has {one!r} and {other!r}; pass one of them")
    bounds = {word: _bound(f"{name}[{word!r}]", bound) for word, bound in condition.items()}
    if len({isinstance(bound, datetime) for bound in bounds.values()}) > 1:
        raise InvalidRequestError(f"{name}={dict(condition)!r} has a number and a date; pass bounds of one kind")
    found = Range(**bounds)
    if len(bounds) == 2:
        ends = list(found.bounds.values())
        if ends[0] > ends[1] or (ends[0] == ends[1] and bounds.keys() != {"gte", "lte"}):
            raise InvalidRequestError(f"{name}={dict(condition)!r} has nothing between its bounds")
    return found


def _bound(name: str, given: object) -> Bound:
    try:
        bound = json_value(name, given)
    except InvalidRequestError:  # NaN, or an int of more than 64 bits
        bound = None
    if isinstance(bound, int | float) and not isinstance(bound, bool):
        return bound
    if isinstance(bound, str) and (time := time_of(bound)) is not None:
        return time
    raise InvalidRequestError(
        f"{name}={given!r} is no bound; pass a number (finite, an int of 64 bits), or a date or time in ISO 8601, like "
        "'2024-01-31' or '2024-01-31T12:00:00+00:00'"
    )


def _day_of(bound: Any, days: int, *, beyond: str) -> str:
    """The day so many days after a bound, or ``beyond`` all days."""
    try:
        return beyond if bound is None else (bound.astimezone(UTC).date() + days * _DAY).isoformat()
    except OverflowError:
        return beyond
