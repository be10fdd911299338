"""Command: plain help, options that have another name now, and errors as they are written in a shell."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from millpond.cli.arguments.shell_words import ShellWords
from millpond.errors import InvalidRequestError, MillpondError

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What the parser raises for words that it cannot read; typer has no public name for it."""

# Options of earlier versions, in a command that has the new one.
_RENAMED = {
    "--out": "--report",
    "--html": "--report",
    "--top-n": "--k",
    "--widths": "--dimensions",
    "--width": "--dimensions",
    "--output": "--format",
    "--json": "--format",
}


class _Summary:
    """The first paragraph of a help text, whole, where the commands are listed."""

    help: str | None

    def get_short_help_str(self, limit: int = 0) -> str:
        """The paragraph on one line."""
        return " ".join((self.help or "").split("\n\n")[0].split())


class Group(_Summary, TyperGroup):
    """Commands under one word."""


class Command(_Summary, TyperCommand):
    """A command whose errors name its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an option that has another name now is an error that says so."""
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            old = getattr(error, "option_name", None)
            new = _RENAMED.get(str(old))
            if new is None or not any(new in option.opts for option in self.params):
                raise
            shown = f"{new} json" if old == "--json" else new
            raise InvalidRequestError(f"{old} is {shown} now; write that") from None

    def option_of(self, ctx: Any, param: str) -> str | None:
        """The option that is passed on as the argument ``param``."""
        for option in self.params:
            if option.name == param:
                return next((name for name in option.opts if name.startswith("--")), None)
        return None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help as plain lines, with the URLs of the installed databases in place of ``{sinks}``."""
        for option in self.params:
            words = getattr(option, "help", None) or ""
            if "{sinks}" in words:
                from millpond.ingest.sinks.database import url_examples

                option.help = words.replace("{sinks}", url_examples())  # type: ignore[attr-defined]
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

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except MillpondError as error:
            words = ShellWords.of(self.params, lambda param: self.option_of(ctx, param))
            error.args = (words.rewrite(str(error)), *error.args[1:])
            error.__notes__ = [words.rewrite(note) for note in getattr(error, "__notes__", ())]
            raise
