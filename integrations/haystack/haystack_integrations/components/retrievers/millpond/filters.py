"""Haystack's filters as those of millpond's indexes and sinks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_BOUNDS = {">": "gt", ">=": "gte", "<": "lt", "<=": "lte"}


def to_conditions(filters: Any) -> Any:
    """For each metadata key a value, a list of values or a range; anything but Haystack's filters stays as it is.

    Raises:
        ValueError: An operator that millpond's filters lack, or two conditions that do not fit together.
    """
    if not isinstance(filters, Mapping) or "operator" not in filters:
        return filters or None
    conditions: dict[str, Any] = {}
    for leaf in _leaves(filters):
        key, operator, value = str(leaf["field"]).removeprefix("meta."), leaf["operator"], leaf["value"]
        if operator in _BOUNDS:
            known = conditions.setdefault(key, {})
            if not isinstance(known, dict) or _BOUNDS[operator] in known:
                raise ValueError(
                    f"two filters name the key {key!r}; millpond takes one for each, or a range's two ends"
                )
            known[_BOUNDS[operator]] = value
        elif operator not in ("==", "in"):
            raise ValueError(f"the operator {operator!r} of {key!r} is not ==, in, >, >=, <, <= or AND")
        elif key in conditions:
            raise ValueError(f"two filters name the key {key!r}; millpond takes one for each, or a range's two ends")
        else:
            conditions[key] = value
    return conditions


def _leaves(filters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The comparisons that must all hold."""
    if "conditions" not in filters:
        yield filters
        return
    if filters["operator"] != "AND":
        raise ValueError(f"the filters are joined by {filters['operator']!r}; millpond joins by AND")
    for each in filters["conditions"]:
        yield from _leaves(each)
