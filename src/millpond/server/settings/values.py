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
    """One value from one source."""

    label: str  # its name in errors: --port, MILLPOND_PORT, server.yaml: port
    value: Any = field(repr=False)  # a text, or a value of a YAML type
    listed: bool = False  # whether a list is one text with commas between its items
    secret: bool = False  # whether errors leave the value out
    opposite: bool = False  # whether the switch is negated, such as disable_log_requests

    def read(self, kind: Any) -> Any:
        """The value converted to ``kind``, the type of a field of a configuration."""
        if get_origin(kind) is Literal:
            if self.value not in get_args(kind):
                raise self._refused(f"one of {', '.join(get_args(kind))}")
            return self.value
        return _READERS[kind](self)

    def _refused(self, expected: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self.label}{'' if self.secret else f'={self.value!r}'} must be {expected}")

    def _text(self) -> str:
        if not isinstance(self.value, str):
            raise self._refused("text; put it in quotes")
        return self.value

    def _path(self) -> Path:
        if not self._text():
            raise self._refused("a path")
        return Path(self.value).expanduser()

    def _whole(self) -> int:
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return self.value
        match = _WHOLE.fullmatch(self.value.strip()) if isinstance(self.value, str) else None
        number = 0.5 if match is None else float(match[1]) * _UNITS[match[2]]
        if not number.is_integer():
            raise self._refused("a whole number, such as 8192, 8k (8000) or 8K (8192)")
        return int(number)

    def _number(self) -> float:
        try:
            return float("a bool is none" if isinstance(self.value, bool) else self.value)
        except (TypeError, ValueError):
            raise self._refused("a number") from None

    def _switch(self) -> bool:
        text = str(self.value).strip().lower()
        if not isinstance(self.value, bool | str) or text not in (*_YES, *_NO):
            raise self._refused("true or false")
        return (text in _YES) != self.opposite

    def _list(self) -> tuple[str, ...]:
        items = self.value
        if isinstance(items, list | tuple) and len(items) == 1 and isinstance(items[0], str):
            items = items[0]
        # JSON, as in vLLM's --allowed-origins; an API key may start with any character.
        if isinstance(items, str) and items.lstrip().startswith("[") and not self.secret:
            try:
                items = json.loads(items)
            except ValueError:
                raise self._refused("a JSON list of texts, since it begins with [") from None
        if isinstance(items, str):
            items = [item.strip() for item in items.split(",") if item.strip()] if self.listed else [items]
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise self._refused("a text or a list of texts; put numbers in quotes")
        return tuple(items)

    def _mapping(self) -> Mapping[str, Any]:
        try:
            value = json.loads(self.value) if isinstance(self.value, str) else self.value
        except ValueError as error:
            raise self._refused(f"a JSON object ({error})") from None
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self._refused("an object, such as " + '{"is_matryoshka": true}')
        return value


# By the type of the configuration's field.
_READERS: Mapping[Any, Callable[[RawValue], Any]] = {
    **dict.fromkeys((str, str | None), RawValue._text),
    **dict.fromkeys((int, int | None), RawValue._whole),
    **dict.fromkeys((Mapping[str, Any] | None, Mapping[str, Any] | str | None), RawValue._mapping),
    Path | None: RawValue._path,
    float: RawValue._number,
    bool: RawValue._switch,
    tuple[str, ...]: RawValue._list,
}
