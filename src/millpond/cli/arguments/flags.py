"""Command: errors name the option that they are about: ``max_length=64 is ...`` becomes ``--max-length=64 is ...``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from millpond.errors import MillpondError


class Command(TyperCommand):
    """A command whose errors begin with the option that they are about, if an error's ``param`` is one of its."""

    def option_of(self, ctx: Any, param: str) -> str | None:
        """The option that is passed on as the argument ``param``."""
        for option in self.params:
            if option.name == param:
                return next((name for name in option.opts if name.startswith("--")), None)
        return None

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
        try:
            return super().invoke(ctx)
        except MillpondError as error:
            option = None if error.param is None else self.option_of(ctx, error.param)
            if option is not None:
                error.args = (f"{option}{str(error).removeprefix(str(error.param))}", *error.args[1:])
            raise
