"""ServeCommand: vLLM's command line for ``millpond serve``, rewritten for typer."""

from __future__ import annotations

import difflib
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from millpond.cli.arguments.flags import Command, Flag
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

    def error_flags(self, ctx: Any) -> dict[str, Flag]:
        """The options that errors name; not those whose value may come from the environment or a file."""
        elsewhere = ctx.params.get("config") is not None or "MILLPOND_CONFIG" in os.environ
        return {
            name: flag
            for name, flag in super().error_flags(ctx).items()
            if getattr(ctx.get_parameter_source(name), "name", None) == "COMMANDLINE"
            or not (elsewhere or f"MILLPOND_{name.upper()}" in os.environ)
        }

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
    """(arguments for typer, vLLM's arguments that have no effect).

    Args:
        args: The arguments as typed.
        takes_value: The program's options, and whether each takes a value.

    Raises:
        InvalidRequestError: An unknown flag, or a flag without its value.
    """
    waiting = deque(args)
    words: list[str] = []
    ignored_args: dict[str, str] = {}
    objects: dict[str, dict[str, Any]] = {}
    while waiting:
        word = waiting.popleft()
        if word == "--":
            return [*words, word, *waiting], ignored_args
        if not word.startswith("-") or word == "-":
            words.append(word)
            continue
        typed, equals, value = word.partition("=")
        base, _, path = _SHORT.get(typed, typed).partition(".")
        flag = f"--{base[2:].replace('_', '-')}" if base.startswith("--") else base
        name = flag[2:].replace("-", "_")
        if path and flag in _OBJECTS:
            _put(objects.setdefault(flag, {}), path, value if equals else _next(waiting, typed), typed)
        elif path or (flag not in takes_value and name.removeprefix("no_") not in SERVER_IGNORED_ARGS):
            raise _no_such_flag(typed, takes_value)
        elif flag == _NAMES and not equals:
            words += _several(waiting, words)
        elif takes_value.get(flag, name in SERVER_IGNORED_ARGS - SWITCHES):
            value = value if equals else _next(waiting, typed)
            if flag in takes_value:
                words += [flag, value]
            else:
                ignored_args[name] = value
        elif equals:
            raise InvalidRequestError(f"{typed} takes no value; write {typed}, or the flag for the opposite")
        elif flag in takes_value:
            words.append(flag)
        else:
            ignored_args[name.removeprefix("no_")] = "true" if name in SWITCHES else "false"
    for flag, content in objects.items():
        if flag in words:
            raise InvalidRequestError(f"{flag} is given as JSON and key by key; give it in one way")
        words += [flag, json.dumps(content)]
    return words, ignored_args


def _next(waiting: deque[str], typed: str) -> str:
    if not waiting:
        raise InvalidRequestError(f"{typed} needs a value behind it")
    return waiting.popleft()


def _several(waiting: deque[str], preceding: Sequence[str]) -> list[str]:
    """The names: as in vLLM, every word up to the next flag."""
    names = []
    while waiting and not waiting[0].startswith("-"):
        names.append(waiting.popleft())
    if not names:
        raise InvalidRequestError(f"{_NAMES} needs a name behind it")
    if _NAMES in preceding and len(names) > 1:
        raise InvalidRequestError(
            f"{_NAMES} takes every word up to the next flag, and would make names of {', '.join(names[1:])}; "
            "put the models first"
        )
    return [word for name in names for word in (_NAMES, name)]


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
