"""Given: a setting's value as a flag, a variable or a file gave it, and how it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from millpond.errors import InvalidRequestError

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# As vLLM reads them: 16k is 16,000 and 16K is 16,384.
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WHOLE = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmgKMG]?)")


@dataclass(frozen=True, kw_only=True)
class Values:
    """One value from one source.

    Attributes:
        label: What errors call it: ``--port``, ``MILLPOND_PORT``, ``server.yaml: port``.
        value: Text, or what the file's types make of it.
        listed: A list is one text with commas between its items.
        secret: No error shows the value.
        opposite: A switch that means the opposite, such as ``disable_log_requests``.
    """

    label: str
    value: Any = field(repr=False)
    listed: bool = False
    secret: bool = False
    opposite: bool = False

    def read(self, kind: Any) -> Any:
        """The value as a setting of the type ``kind``.

        Raises:
            InvalidRequestError: It is none; the message says whose value it is and what would do.
        """
        if get_origin(kind) is Literal:
            if self.value not in get_args(kind):
                raise self.refused(f"one of {', '.join(get_args(kind))}")
            return self.value
        return READERS[kind](self)

    def refused(self, wanted: str) -> InvalidRequestError:
        """The error for a value that is not what is ``wanted``."""
        return InvalidRequestError(f"{self.label}{'' if self.secret else f'={self.value!r}'} must be {wanted}")


def _text(given: Values) -> str:
    if not isinstance(given.value, str):
        raise given.refused("text; put it in quotes")
    return given.value


def _path(given: Values) -> Path:
    if not _text(given):
        raise given.refused("a path")
    return Path(given.value).expanduser()


def _whole(given: Values) -> int:
    if isinstance(given.value, int) and not isinstance(given.value, bool):
        return given.value
    found = _WHOLE.fullmatch(given.value.strip()) if isinstance(given.value, str) else None
    number = 0.5 if found is None else float(found[1]) * _UNITS[found[2]]
    if not number.is_integer():
        raise given.refused("a whole number, such as 8192, 8k (8000) or 8K (8192)")
    return int(number)


def _number(given: Values) -> float:
    if not isinstance(given.value, bool) and isinstance(given.value, int | float | str):
        try:
            return float(given.value)
        except ValueError:
            pass
    raise given.refused("a number")


def _switch(given: Values) -> bool:
    said = str(given.value).strip().lower()
    if not isinstance(given.value, bool | str) or said not in (*_YES, *_NO):
        raise given.refused("true or false")
    return (said in _YES) != given.opposite


def _list(given: Values) -> tuple[str, ...]:
    items = given.value
    if isinstance(items, list | tuple) and len(items) == 1 and isinstance(items[0], str):
        items = items[0]
    # JSON, as vLLM's --allowed-origins; a key may begin with anything.
    if isinstance(items, str) and items.lstrip().startswith("[") and not given.secret:
        try:
            items = json.loads(items)
        except ValueError:
            raise given.refused("a JSON list of texts, since it begins with [") from None
    if isinstance(items, str):
        items = [item.strip() for item in items.split(",") if item.strip()] if given.listed else [items]
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise given.refused("a text or a list of texts; put numbers in quotes")
    return tuple(items)


def _mapping(given: Values) -> Mapping[str, Any]:
    value = given.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise given.refused(f"a JSON object ({error})") from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise given.refused("an object, such as " + '{"is_matryoshka": true}')
    return value


# The types of the configurations' fields.
READERS: Mapping[Any, Callable[[Values], Any]] = {
    str: _text,
    str | None: _text,
    Path | None: _path,
    int: _whole,
    int | None: _whole,
    float: _number,
    bool: _switch,
    tuple[str, ...]: _list,
    Mapping[str, Any] | None: _mapping,
    Mapping[str, Any] | str | None: _mapping,
}
