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

# Keys in a context's meta: vLLM's arguments that have no effect, and settings that are no options of typer.
IGNORED_ARGS, UNLISTED = "millpond.ignored_args", "millpond.unlisted"

_OTHER_NAMES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "--override-pooler-config": "--pooler-config",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--enable-log-requests": "--log-requests",
    "--no-enable-log-requests": "--disable-log-requests",
}
_NAMES = "--served-model-name"
# JSON options that may be given key by key: --pooler-config.pooling_type CLS
_OBJECTS = ("--hf-overrides", "--pooler-config")
# vLLM's settings that nobody needs here, and the help leaves out.
_UNLISTED = ("--runner", "--task")
_REMOTE_CODE = {"--trust-remote-code": True, "--no-trust-remote-code": False}


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
        words = _Words(args, takes_value)
        ctx.meta[IGNORED_ARGS], ctx.meta[UNLISTED] = words.ignored, words.unlisted
        return super().parse_args(ctx, words.read())

    def option_of(self, ctx: Any, param: str) -> str | None:
        """The option that is passed on as the argument ``param``, unless its value may come from elsewhere."""
        name = "max_model_len" if param == "max_length" else param
        elsewhere = ctx.params.get("config") is not None or "MILLPOND_CONFIG" in os.environ
        typed = getattr(ctx.get_parameter_source(name), "name", None) == "COMMANDLINE"
        hidden = not typed and (elsewhere or f"MILLPOND_{name.upper()}" in os.environ)
        return None if hidden else super().option_of(ctx, name)


class _Words:
    """The arguments of a command line, rewritten one after the other."""

    def __init__(self, args: Sequence[str], takes_value: Mapping[str, bool]) -> None:
        self.ignored: dict[str, str] = {}
        self.unlisted: dict[str, Any] = {}
        self._waiting = deque(args)
        self._takes_value = takes_value
        self._words: list[str] = []
        self._objects: dict[str, dict[str, Any]] = {}

    def read(self) -> list[str]:
        """The arguments for typer."""
        while self._waiting:
            self._step()
        for flag, content in self._objects.items():
            if flag in self._words:
                raise InvalidRequestError(f"{flag} is given as JSON and key by key; give it in one way")
            self._words += [flag, json.dumps(content)]
        return self._words

    def _step(self) -> None:
        """Rewrite the next argument, and its value."""
        word = self._waiting.popleft()
        if word == "--":
            self._words += [word, *self._waiting]
            return self._waiting.clear()
        if not word.startswith("-") or word == "-":
            return self._words.append(word)
        typed, equals, value = word.partition("=")
        base, _, path = typed.partition(".")
        flag = f"--{base[2:].replace('_', '-')}" if base.startswith("--") else base
        flag = _OTHER_NAMES.get(flag, flag)
        name = flag[2:].replace("-", "_")
        if equals:
            self._waiting.appendleft(value)
        if path:
            if flag not in _OBJECTS:
                raise self._no_such_flag(typed)
            _put(self._objects.setdefault(flag, {}), path, self._next(typed), typed)
        elif flag == _NAMES and not equals:
            self._words += self._names()
        elif flag == "--model":
            self._words.append(self._next(typed))
        elif flag in _UNLISTED:
            self.unlisted[name] = self._next(typed)
        elif self._takes_value.get(flag):
            self._words += [flag, self._next(typed)]
        elif flag not in self._takes_value and name in SERVER_IGNORED_ARGS - SWITCHES:
            self.ignored[name] = self._next(typed)
        else:
            self._switch(flag, typed, bool(equals))

    def _switch(self, flag: str, typed: str, equals: bool) -> None:
        positive = flag[2:].removeprefix("no-").replace("-", "_")
        if flag not in self._takes_value and flag not in _REMOTE_CODE and positive not in SERVER_IGNORED_ARGS:
            raise self._no_such_flag(typed)
        if equals:
            raise InvalidRequestError(f"{typed} takes no value; write {typed}, or the flag for the opposite")
        if flag in self._takes_value:
            self._words.append(flag)
        elif flag in _REMOTE_CODE:
            self.unlisted["trust_remote_code"] = _REMOTE_CODE[flag]
        else:
            self.ignored[positive] = "false" if flag.startswith("--no-") else "true"

    def _next(self, typed: str) -> str:
        if not self._waiting:
            raise InvalidRequestError(f"{typed} needs a value behind it")
        return self._waiting.popleft()

    def _names(self) -> list[str]:
        """The names: as in vLLM, every word up to the next flag."""
        names = []
        while self._waiting and not self._waiting[0].startswith("-"):
            names.append(self._waiting.popleft())
        if not names:
            raise InvalidRequestError(f"{_NAMES} needs a name behind it")
        if _NAMES in self._words and len(names) > 1:
            raise InvalidRequestError(
                f"{_NAMES} takes every word up to the next flag, and would make names of {', '.join(names[1:])}; "
                "put the models first"
            )
        return [word for name in names for word in (_NAMES, name)]

    def _no_such_flag(self, typed: str) -> InvalidRequestError:
        near = difflib.get_close_matches(typed, list(self._takes_value), n=1)
        hint = f"did you mean {near[0]}?" if near else "millpond serve --help lists what there is"
        return InvalidRequestError(f"serve has no flag {typed}; {hint}")


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
