"""Messages in the words of a shell: what Python writes ``dimensions=[64]`` is ``--dimensions=64`` there."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

from millpond.values.config import EngineConfig

# Arguments in Python that commands have in another form.
_OTHER_NAMES = {"sparse_engine": "sparse_model", "top_n": "k", "top_k": "k"}
_VALUE = r"""\{[^{}]*\}|\[[^\[\]]*\]|'[^']*'|"[^"]*"|True|False|None|-?\d+(?:\.\d+)?(?!\w)"""
_NOT_INSIDE = r"""(?<![\w.\-/'"\[])"""
_ASSIGNED = re.compile(rf"{_NOT_INSIDE}([a-z][a-z_]*)=({_VALUE})")
_LEFT_OUT = re.compile(r"(?<=leave )([a-z][a-z_]*)(?= out)")
_NAMED = re.compile(rf"{_NOT_INSIDE}([a-z]+(?:_[a-z]+)+)(?![\w=('\"\]])")


@dataclass(frozen=True, kw_only=True)
class ShellWords:
    """How a command's options are written.

    Attributes:
        option: The option for an argument in Python; ``None`` if there is no such option.
        negation: The same for the value ``False`` of a flag.
        engine: Names that ``--engine`` takes.
        sink: Names that ``--sink`` takes.
    """

    option: Callable[[str], str | None]
    negation: Callable[[str], str | None]
    engine: Collection[str]
    sink: Collection[str]

    @classmethod
    def of(cls, params: Collection[Any], option_of: Callable[[str], str | None]) -> ShellWords:
        """The words of a command with these parameters."""
        named = {each.name: each for each in params}

        def option(name: str) -> str | None:
            return option_of(_OTHER_NAMES.get(name, name) if name not in named else name)

        def negation(name: str) -> str | None:
            return next(iter(getattr(named.get(name), "secondary_opts", ())), None)

        engine: Collection[str] = ()
        sink: Collection[str] = ()
        if "engine" in named:
            engine = {each.name for each in fields(EngineConfig)}
        if "sink" in named:
            from millpond.ingest.sinks.database import installed

            sink = {name for one in installed().values() for name in one.options or ()}
        return cls(option=option, negation=negation, engine=engine, sink=sink)

    def rewrite(self, message: str) -> str:
        """A message with the options as a shell takes them."""
        head, equals, rest = message.partition("=")
        if equals and head.isidentifier() and not _ASSIGNED.match(message) and (option := self.option(head)):
            message = f"{option}={rest}"  # of a value in another form
        message = _ASSIGNED.sub(lambda match: self._assigned(*match.groups()) or match[0], message)
        message = _LEFT_OUT.sub(lambda match: self._named(match[1]) or match[0], message)
        return _NAMED.sub(lambda match: self.option(match[1]) or match[0], message)

    def _assigned(self, name: str, text: str) -> str | None:
        option, value = self.option(name), ast.literal_eval(text)
        if option is None:
            kind = "--engine" if name in self.engine else "--sink" if name in self.sink else None
            return kind and f"{kind} {shlex.quote(f'{name}={_json(value)}')}"
        if value is True:
            return option
        if value is False and (negation := self.negation(name)):
            return negation
        if isinstance(value, list | tuple):
            return f"{option}={','.join(map(str, value))}"
        return f"{option}={text if isinstance(value, str) else _json(value)}"

    def _named(self, name: str) -> str | None:
        kinds = (("--engine", self.engine), ("--sink", self.sink))
        return self.option(name) or next((f"{kind} {name}" for kind, names in kinds if name in names), None)


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
