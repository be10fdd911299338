"""Options written ``NAME=VALUE``: the arguments of an engine and of a sink that have no option of their own."""

from __future__ import annotations

import json
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from millpond.values.config import EngineConfig

Setting = tuple[str, str]
"""A name and a value, as they are written."""


def read_setting(text: str) -> Setting:
    """Parse one ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE, as dtype=float32")
    return name, value


def engine_settings(settings: Iterable[Setting] | None) -> dict[str, Any]:
    """The arguments of an Engine, with values of the types that they have."""
    known = {name: set(_types_of(hint)) for name, hint in get_type_hints(EngineConfig).items() if name != "model"}
    written = _once(settings, option="--engine")
    if unknown := written.keys() - known.keys():
        raise typer.BadParameter(
            f"{min(unknown)!r} is not an option of Engine; choose {', '.join(sorted(known))}", param_hint="--engine"
        )
    return {name: _value(text, tuple(known[name])) for name, text in written.items()}


def sink_settings(settings: Iterable[Setting] | None) -> dict[str, Any]:
    """The arguments of a sink: JSON, or a str; the sink checks them."""
    return {name: _value(text, (object,)) for name, text in _once(settings, option="--sink").items()}


def _once(settings: Iterable[Setting] | None, *, option: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, text in settings or ():
        if name in values:
            raise typer.BadParameter(f"{name!r} is written twice", param_hint=option)
        values[name] = text
    return values


def _value(text: str, accepted: tuple[type, ...]) -> Any:
    """The JSON value, if the argument takes its type; else the text, which the argument's owner accepts or refuses."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, accepted) else text


def _types_of(annotation: Any) -> Iterable[type]:
    """The types of the values that an annotation allows."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _types_of(member)
    elif origin is Literal:
        yield from map(type, get_args(annotation))
    elif annotation is float:
        yield from (int, float)
    elif annotation is None:
        yield type(None)
    elif isinstance(origin or annotation, type):
        yield origin or annotation
