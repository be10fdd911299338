"""Every option of every command: its words, what its value is called, its help text, and the commands that have it.

``python tests/house/options.py > tests/house/options.txt`` writes the table anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from millpond.cli.app import app


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield name.strip(), command
    for each, one in inner.items():
        yield from commands(one, f"{name} {each}")


def table() -> dict[tuple[str, str], dict[str, list[str]]]:
    """For each option and name of its value the help texts, each with the commands that say so."""
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, command in commands(get_command(app)):
        for each in command.params:
            if each.param_type_name == "option":
                word = next(one for one in each.opts if one.startswith("--"))
                texts = rows.setdefault((word, each.metavar or ""), {})
                texts.setdefault(" ".join(each.help.split()), []).append(name)
    return dict(sorted(rows.items()))


def lines() -> Iterator[str]:
    """The table as text."""
    for (word, metavar), texts in table().items():
        for text, names in texts.items():
            yield f"{f'{word} {metavar}'.strip()}: {text} [{', '.join(names)}]"


if __name__ == "__main__":
    print(*lines(), sep="\n")
