"""--filter: conditions on metadata, as every command that filters reads them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from millpond.cli.arguments import options
from millpond.errors import InvalidRequestError
from millpond.support.filters import check_filter

Filter = Annotated[
    list[str] | None,
    typer.Option(
        help="""Metadata that must match: year=2024, lang=en, code='"07"' (a str), a range in quotes ('year>=2020',
        'published<2024-02-01'), or a JSON object ('{"year": {"gte": 2020, "lt": 2024}}'). Several values of a key: one
        of them; several keys, and both ends of a range: all.""",
        metavar="CONDITION",
    ),
]

_CONDITION = re.compile(r"(?P<key>[^<>=]*?)(?P<sign>!?[<>=]{1,2})(?P<value>.*)", re.DOTALL)
_WORDS = {">": "gt", ">=": "gte", "<": "lt", "<=": "lte"}


def read_filter(words: Iterable[str] | None) -> dict[str, Any] | None:
    """Conditions from ``KEY=VALUE``, ``KEY>=BOUND`` and JSON objects; ``None`` for none.

    A repeated key has one of its values, and the bounds of a key make one range.
    """
    values: dict[str, list[Any]] = {}
    ranges: dict[str, dict[str, Any]] = {}
    for word in words or ():
        for key, value in (options.read_object(word) if word.lstrip().startswith("{") else _read(word)).items():
            if not isinstance(value, dict):
                values.setdefault(key, []).extend(value if isinstance(value, list) else [value])
            elif twice := sorted(value.keys() & ranges.setdefault(key, {}).keys()):
                raise _refused(f"{key} has {twice[0]} twice; name one bound")
            else:
                ranges[key].update(value)
    if both := sorted(values.keys() & ranges.keys()):
        raise _refused(f"{both[0]} has a value and a range; name one of them")
    single = {key: found[0] if len(found) == 1 else found for key, found in values.items()}
    found = {**single, **ranges}
    try:
        check_filter(found)
    except InvalidRequestError as error:
        raise _refused(str(error)) from None
    return found or None


def _read(word: str) -> dict[str, Any]:
    """``{key: value}`` or ``{key: {"gte": bound}}`` of one condition."""
    parts = _CONDITION.fullmatch(word)
    if parts is None or not parts["key"].strip():
        raise _refused(f"{word!r} is no condition, like year=2024 or 'year>=2020'")
    key, sign, value = parts["key"].strip(), parts["sign"], _value(parts["value"].strip())
    if sign == "=":
        return {key: value}
    if sign not in _WORDS:
        raise _refused(f"{word!r} has {sign!r}; a condition has =, >, >=, < or <=")
    return {key: {_WORDS[sign]: value}}


def _value(text: str) -> Any:
    """A value as JSON, if it is a number, true, false, a str in quotes or a list; else the text itself."""
    try:
        value = json.loads(text, parse_constant=str)  # NaN and Infinity are words
    except (ValueError, RecursionError):
        return text
    plain = isinstance(value, bool | int | str | list) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else text


def _refused(words: str) -> typer.BadParameter:
    return typer.BadParameter(words, param_hint="--filter")
