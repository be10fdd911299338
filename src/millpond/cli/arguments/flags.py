"""Errors in the words of the command line: ``max_length=64`` of the Python API is written ``--max-length 64``."""

from __future__ import annotations

import ast
import json
import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

from millpond.errors import MillpondError

# Arguments of the Python API that are an option of another name. Of several the first that the command has counts.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_length": ("max_model_len",),
    "batch_size": ("max_batch_tokens",),
    "location": ("to",),
    "uri": ("to",),
    "max_tokens": ("chunk_tokens",),
    "overlap": ("chunk_overlap",),
    "sparse_engine": ("sparse_model",),
}
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_BARE = re.compile(r"[^\s,;:)]*[^\s,;:).]")
_OUTSIDE_QUOTES = r"""(?<![\w.'"\[/=-])"""  # nor in a path, in an attribute, or in an option
_CLOSING = {"[": "]", "{": "}"}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """An option of a command.

    Attributes:
        on: ``--cache``, or ``--normalize`` of a switch.
        off: ``--no-normalize``, if the switch has it.
        switch: Whether it takes no value.
    """

    on: str
    off: str | None
    switch: bool

    def written(self, value: Any) -> str:
        """The option with a value, as a shell takes it."""
        if value is None or (self.switch and not value):
            return self.off if self.off and value is not None else f"no {self.on}"
        if self.switch:
            return self.on
        if isinstance(value, dict):
            text = json.dumps(value, default=lambda _: "...")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        return f"{self.on} {shlex.quote(text)}"


def flags_of(options: Sequence[Any]) -> dict[str, Flag]:
    """The options of a command by the name of the argument that they pass on."""
    flags = {}
    for option in options:
        long = [name for name in option.opts if name.startswith("--")]
        if long:
            off = next((name for name in option.secondary_opts if name.startswith("--")), None)
            flags[option.name] = Flag(on=long[0], off=off, switch=bool(getattr(option, "is_flag", False)))
    for argument, names in _OTHER_NAMES.items():
        known = [flags[name] for name in names if name in flags]
        if argument not in flags and known:
            flags[argument] = known[0]
    return flags


def in_flags(message: str, flags: Mapping[str, Flag]) -> str:
    """A message with the arguments of the Python API written as a command's options.

    ``name=value`` becomes ``--name value``; a name alone is replaced if it cannot be a word (``max_length``), or in
    "leave dimensions out". What stands in quotes, and the names that are no option of the command, stay.
    """
    names = sorted(flags, key=len, reverse=True)
    any_name = "|".join(names)
    compound = "|".join(name for name in names if "_" in name) or "(?!)"
    pattern = re.compile(
        rf"""(?P<quoted> (?<!\w) (?:{_QUOTED.pattern}) (?!\w)) | {_OUTSIDE_QUOTES} (?:
            (?P<argument>{any_name}) = (?=\S)
          | leave\ (?P<left_out>{any_name})\ out
          | (?P<alone>{compound}) (?![\w='"/-] | \.\w)
        )""",
        re.VERBOSE | re.DOTALL,
    )
    parts: list[str] = []
    position = 0
    while flags and (match := pattern.search(message, position)) is not None:
        parts.append(message[position : match.start()])
        position = match.end()
        if match["quoted"]:
            parts.append(match[0])
        elif match["argument"]:
            value, position = _value(message, position)
            parts.append(flags[match["argument"]].written(value))
        elif match["left_out"]:
            parts.append(f"leave {flags[match['left_out']].on} out")
        else:
            parts.append(flags[match["alone"]].on)
    return "".join([*parts, message[position:]])


def _value(message: str, start: int) -> tuple[Any, int]:
    """The value that is written at ``start``, and where it ends."""
    first = message[start]
    if quoted := _QUOTED.match(message, start):
        try:
            return ast.literal_eval(quoted[0]), quoted.end()
        except (ValueError, SyntaxError):  # not written by Python: a backslash of a path, for example
            return quoted[0][1:-1], quoted.end()
    end = start
    while first in _CLOSING and (end := message.find(_CLOSING[first], end) + 1):
        try:
            return ast.literal_eval(message[start:end]), end
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deep
            continue
    bare = _BARE.match(message, start)
    text = bare[0] if bare else first
    return {"True": True, "False": False, "None": None}.get(text, text), start + len(text)


class Command(TyperCommand):
    """A command whose errors and warnings name its options, not the arguments of the Python API."""

    def error_flags(self, ctx: Any) -> dict[str, Flag]:
        """The options that errors name."""
        return flags_of(self.params)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the URLs of the installed databases in place of ``{sinks}``."""
        for option in self.params:
            words = getattr(option, "help", None) or ""
            if "{sinks}" in words:
                from millpond.ingest.sinks.database import url_examples

                option.help = words.replace("{sinks}", url_examples())  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        flags = self.error_flags(ctx)
        with _log_in_flags(flags):
            try:
                return super().invoke(ctx)
            except MillpondError as error:
                message = in_flags(str(error), flags)
                error.args = (message, *error.args[1:])
                if isinstance(error, ImportError):
                    error.msg = message
                raise


@contextmanager
def _log_in_flags(flags: Mapping[str, Flag]) -> Iterator[None]:
    def rewrite(record: logging.LogRecord) -> bool:
        if record.name.startswith("millpond"):
            record.msg, record.args = in_flags(record.getMessage(), flags), ()
        return True

    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(rewrite)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(rewrite)
