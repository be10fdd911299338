"""Values: a setting's raw value from a flag, a variable or a file, and its conversion to the setting's type."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from millpond.errors import InvalidRequestError

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# As in vLLM: 16k is 16,000 and 16K is 16,384.
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WHOLE = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmgKMG]?)")


@dataclass(frozen=True, kw_only=True)
class RawValue:
    """One value from one source.

    Attributes:
        label: Its name in errors: ``--port``, ``MILLPOND_PORT``, ``server.yaml: port``.
        value: A text, or a value of a YAML type.
        listed: Whether a list is one text with commas between its items.
        secret: Whether errors leave the value out.
        opposite: Whether the switch is negated, such as ``disable_log_requests``.
    """

    label: str
    value: Any = field(repr=False)
    listed: bool = False
    secret: bool = False
    opposite: bool = False

    def read(self, kind: Any) -> Any:
        """The value converted to ``kind``, the type of a field of a configuration.

        Raises:
            InvalidRequestError: It cannot be converted; the message names its source and the valid values.
        """
        if get_origin(kind) is Literal:
            if self.value not in get_args(kind):
                raise self.refused(f"one of {', '.join(get_args(kind))}")
            return self.value
        return READERS[kind](self)

    def refused(self, expected: str) -> InvalidRequestError:
        """The error for a value that is not ``expected``."""
        return InvalidRequestError(f"{self.label}{'' if self.secret else f'={self.value!r}'} must be {expected}")


def _text(raw: RawValue) -> str:
    if not isinstance(raw.value, str):
        raise raw.refused("text; put it in quotes")
    return raw.value


def _path(raw: RawValue) -> Path:
    if not _text(raw):
        raise raw.refused("a path")
    return Path(raw.value).expanduser()


def _whole(raw: RawValue) -> int:
    if isinstance(raw.value, int) and not isinstance(raw.value, bool):
        return raw.value
    match = _WHOLE.fullmatch(raw.value.strip()) if isinstance(raw.value, str) else None
    number = 0.5 if match is None else float(match[1]) * _UNITS[match[2]]
    if not number.is_integer():
        raise raw.refused("a whole number, such as 8192, 8k (8000) or 8K (8192)")
    return int(number)


def _number(raw: RawValue) -> float:
    if not isinstance(raw.value, bool) and isinstance(raw.value, int | float | str):
        try:
            return float(raw.value)
        except ValueError:
            pass
    raise raw.refused("a number")


def _switch(raw: RawValue) -> bool:
    text = str(raw.value).strip().lower()
    if not isinstance(raw.value, bool | str) or text not in (*_YES, *_NO):
        raise raw.refused("true or false")
    return (text in _YES) != raw.opposite


def _list(raw: RawValue) -> tuple[str, ...]:
    items = raw.value
    if isinstance(items, list | tuple) and len(items) == 1 and isinstance(items[0], str):
        items = items[0]
    # JSON, as in vLLM's --allowed-origins; an API key may start with any character.
    if isinstance(items, str) and items.lstrip().startswith("[") and not raw.secret:
        try:
            items = json.loads(items)
        except ValueError:
            raise raw.refused("a JSON list of texts, since it begins with [") from None
    if isinstance(items, str):
        items = [item.strip() for item in items.split(",") if item.strip()] if raw.listed else [items]
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise raw.refused("a text or a list of texts; put numbers in quotes")
    return tuple(items)


def _mapping(raw: RawValue) -> Mapping[str, Any]:
    value = raw.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise raw.refused(f"a JSON object ({error})") from None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise raw.refused("an object, such as " + '{"is_matryoshka": true}')
    return value


# By the type of the configuration's field.
READERS: Mapping[Any, Callable[[RawValue], Any]] = {
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
