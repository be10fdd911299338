"""docs/doors.md, from the table docs/doors.toml and the programs of tests/doors.

After a change of either: ``python docs/site/doors.py`` writes the page again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "doors.md"
PROGRAMS = ROOT / "tests" / "doors" / "programs"

_TEXT = """\
# Doors

<!-- Written by docs/site/doors.py from docs/doors.toml; do not edit. -->

Agents, desktop programs, databases and frameworks ask for vectors in ways of their own. The table has the ways that
lead to millpond; each is tested through the library's own class or client (`make test-doors`), in the version that the
table names. A row without a library is a product that asks the server itself: the test sends its requests, written
down from its source, and no such product runs in it. [The lines to paste](databases_that_ask.md) for those; LangChain
and LlamaIndex have [pages](rag.md) of their own, and so have the clients of [the server](server.md).

{table}

## What a door cannot do

{limits}

## Programs

Each of these is run by the tests, and prints what stands below it.

{programs}
"""


@dataclass(frozen=True, kw_only=True)
class Door:
    """A row of the table; docs/doors.toml says what its fields mean."""

    name: str
    package: str = ""
    version: str = ""
    install: str
    signature: str
    test: str
    cannot: str
    program: str = ""
    prints: str = ""
    serve: Sequence[str] = ()


def doors() -> list[Door]:
    """The table, in the order of the page."""
    rows = tomllib.loads((ROOT / "docs" / "doors.toml").read_text(encoding="utf-8")).get("door", [])
    return [Door(**row) for row in rows]


def page() -> str:
    """The page."""
    rows = doors()
    cells = [
        {
            "door": f"[{door.name}](#{door.name.lower().replace(' ', '-')})" if door.program else door.name,
            "library": f"{door.package} {door.version}".strip() or "-",
            "install": f"`{door.install}`",
            "what it calls": f"`{door.signature}`",
            "test": f"`{door.test}`",
        }
        for door in rows
    ]
    return _TEXT.format(
        table=_table(cells),
        limits="\n".join(f"- **{door.name}**: {door.cannot}" for door in rows),
        programs="\n".join(_program(door) for door in rows if door.program).rstrip("\n"),
    )


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    header = list(rows[0]) if rows else []
    lines = [header, ["---"] * len(header), *([row[name] for name in header] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _program(door: Door) -> str:
    text = (PROGRAMS / door.program).read_text(encoding="utf-8").strip()
    server = f"`millpond serve {' '.join(door.serve)}` runs beside it.\n\n" if door.serve else ""
    return f"### {door.name}\n\n{server}```python\n{text}\n```\n\n```text\n{door.prints.strip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
