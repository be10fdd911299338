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

Agents, desktop programs, databases and frameworks each ask for vectors in a way of their own. The table has those ways
that lead to millpond. Each is tested (`make test-doors`) through the library's own class or client, in the version that
the table names. A row without a library is a product that asks the server: no such product runs in the tests, which
send its requests as its source writes them, and [Databases and programs that ask](databases_that_ask.md) has the lines
to paste. [LangChain](../integrations/langchain/README.md), [LlamaIndex](../integrations/llama-index/README.md) and the
other clients of [the server](server.md) have pages of their own.

Nothing of millpond is on a package index yet. In a checkout, `pip install ".[mcp]"` stands for `'millpond[mcp]'`, and
`pip install . ./integrations/haystack` for `millpond-haystack`.

{table}

## What a door cannot do

{limits}

## Programs

Each is a file of `tests/doors/programs`. The tests run it, and it prints what stands below it.

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
