"""ServeCommand: vLLM's command line for ``millpond serve``, rewritten for typer."""

from __future__ import annotations

import difflib
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from millpond.cli.arguments.flags import Command
from millpond.errors import InvalidRequestError
from millpond.vllm.arguments import SERVER_IGNORED_ARGS, SWITCHES

IGNORED_ARGS = "millpond.ignored_args"  # key in a context's meta for vLLM's arguments that have no effect

_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-q": "--quantization"}
_NAMES = "--served-model-name"
# JSON options that may be given key by key: --pooler-config.pooling_type CLS
_OBJECTS = ("--hf-overrides", "--pooler-config")


class ServeCommand(Command):
    """Accepts more than typer: flags with ``_``, several values after one flag, single keys of a JSON object."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rewrite the arguments, then let typer parse them."""
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in self.get_params(ctx)
            for name in (*option.opts, *option.secondary_opts)
            if name.startswith("-")
        }
        words, ctx.meta[IGNORED_ARGS] = read(args, takes_value)
        return super().parse_args(ctx, words)

    def option_of(self, ctx: Any, param: str) -> str | None:
        """The option that is passed on as the argument ``param``, unless its value may come from elsewhere."""
        name = "max_model_len" if param == "max_length" else param
        elsewhere = ctx.params.get("config") is not None or "MILLPOND_CONFIG" in os.environ
        typed = getattr(ctx.get_parameter_source(name), "name", None) == "COMMANDLINE"
        hidden = not typed and (elsewhere or f"MILLPOND_{name.upper()}" in os.environ)
        return None if hidden else super().option_of(ctx, name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Plain lines: typer's boxes cut long flags in a terminal of 80 columns."""
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The options under their headings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            line = option.get_help_record(ctx)
            if line is not None:
                rest = "Arguments" if option.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(option, "rich_help_panel", None) or rest, []).append(line)
        for heading, lines in sections.items():
            with formatter.section(heading):
                formatter.write_dl(lines)


def read(args: Sequence[str], takes_value: Mapping[str, bool]) -> tuple[list[str], dict[str, str]]:
    """(arguments for typer, vLLM's arguments that have no effect)."""
    words = _Words(args, takes_value)
    while words.waiting:
        words.step()
    return words.result()


class _Words:
    """The arguments of a command line, rewritten one after the other."""

    def __init__(self, args: Sequence[str], takes_value: Mapping[str, bool]) -> None:
        self.waiting = deque(args)
        self._takes_value = takes_value
        self._words: list[str] = []
        self._ignored: dict[str, str] = {}
        self._objects: dict[str, dict[str, Any]] = {}

    def step(self) -> None:
        """Rewrite the next argument, and its value."""
        word = self.waiting.popleft()
        if word == "--":
            self._words += [word, *self.waiting]
            return self.waiting.clear()
        if not word.startswith("-") or word == "-":
            return self._words.append(word)
        typed, equals, value = word.partition("=")
        base, _, path = _SHORT.get(typed, typed).partition(".")
        flag = f"--{base[2:].replace('_', '-')}" if base.startswith("--") else base
        if equals:
            self.waiting.appendleft(value)
        if path and flag in _OBJECTS:
            _put(self._objects.setdefault(flag, {}), path, self._next(typed), typed)
        elif not path and flag in self._takes_value:
            self._own(flag, typed, bool(equals))
        elif not path and _setting(flag).removeprefix("no_") in SERVER_IGNORED_ARGS:
            self._ignore(_setting(flag), typed, bool(equals))
        else:
            raise _no_such_flag(typed, self._takes_value)

    def result(self) -> tuple[list[str], dict[str, str]]:
        """(arguments for typer, vLLM's arguments that have no effect)."""
        for flag, content in self._objects.items():
            if flag in self._words:
                raise InvalidRequestError(f"{flag} is given as JSON and key by key; give it in one way")
            self._words += [flag, json.dumps(content)]
        return self._words, self._ignored

    def _own(self, flag: str, typed: str, equals: bool) -> None:
        if flag == _NAMES and not equals:
            self._words += self._names()
        elif self._takes_value[flag]:
            self._words += [flag, self._next(typed)]
        else:
            _refuse_value(typed, equals)
            self._words.append(flag)

    def _ignore(self, name: str, typed: str, equals: bool) -> None:
        if name in SERVER_IGNORED_ARGS - SWITCHES:
            self._ignored[name] = self._next(typed)
        else:
            _refuse_value(typed, equals)
            self._ignored[name.removeprefix("no_")] = "true" if name in SWITCHES else "false"

    def _next(self, typed: str) -> str:
        if not self.waiting:
            raise InvalidRequestError(f"{typed} needs a value behind it")
        return self.waiting.popleft()

    def _names(self) -> list[str]:
        """The names: as in vLLM, every word up to the next flag."""
        names = []
        while self.waiting and not self.waiting[0].startswith("-"):
            names.append(self.waiting.popleft())
        if not names:
            raise InvalidRequestError(f"{_NAMES} needs a name behind it")
        if _NAMES in self._words and len(names) > 1:
            raise InvalidRequestError(
                f"{_NAMES} takes every word up to the next flag, and would make names of {', '.join(names[1:])}; "
                "put the models first"
            )
        return [word for name in names for word in (_NAMES, name)]


def _setting(flag: str) -> str:
    return flag[2:].replace("-", "_")


def _refuse_value(typed: str, equals: bool) -> None:
    if equals:
        raise InvalidRequestError(f"{typed} takes no value; write {typed}, or the flag for the opposite")


def _put(content: dict[str, Any], path: str, text: str, typed: str) -> None:
    """Store one value, JSON or plain text, at a path of keys."""
    *outer, last = path.split(".")
    for key in outer:
        content = content.setdefault(key, {})
        if not isinstance(content, dict):
            raise InvalidRequestError(f"{typed} contradicts an earlier flag, which gave {key} a value of its own")
    try:
        content[last] = json.loads(text)
    except ValueError:
        content[last] = text


def _no_such_flag(typed: str, takes_value: Mapping[str, bool]) -> InvalidRequestError:
    near = difflib.get_close_matches(typed, list(takes_value), n=1)
    hint = f"did you mean {near[0]}?" if near else "millpond serve --help lists what there is"
    return InvalidRequestError(f"serve has no flag {typed}; {hint}")
