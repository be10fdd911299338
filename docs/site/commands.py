"""The page of all commands and their options, from the program itself."""

from __future__ import annotations

import re
from typing import Any

from typer.cli import get_docs_for_click
from typer.main import get_command

from millpond.cli.app import app


def page() -> str:
    """Markdown: a section for each command, with its usage, arguments and options."""
    program: Any = get_command(app)
    context = program.make_context("millpond", ["env"], resilient_parsing=True)
    text = get_docs_for_click(obj=program, ctx=context, name="millpond", title="Commands")
    return _linked(text, program)


def _linked(text: str, program: Any, prefix: str = "millpond") -> str:
    """The text with each list of commands as links and whole sentences; typer cuts them at 45 characters."""
    for name, command in program.commands.items():
        summary = " ".join((command.help or "").strip().split("\n\n")[0].split())
        entry = f"* [`{name}`](#{prefix.replace(' ', '-')}-{name}): {summary}"
        pattern = rf"^#+ (?:`{re.escape(prefix)}`|Commands)$.*?^(?P<entry>\* `{re.escape(name)}`: [^\n]*)$"
        listed = re.search(pattern, text, flags=re.MULTILINE | re.DOTALL)
        if listed is None:
            raise ValueError(f"{prefix} {name} is in no list of commands")
        text = text[: listed.start("entry")] + entry + text[listed.end("entry") :]
        if hasattr(command, "commands"):
            text = _linked(text, command, f"{prefix} {name}")
    return text
