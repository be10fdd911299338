"""Unit: consecutive lines of a file, which a search finds together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

MAX_CHARACTERS = 1200
"""Characters of a unit: what small models read of code, about 256 to 400 tokens."""

_HEAD = 120
_WORD = re.compile(r"\w")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Lines ``first`` to ``last`` of a file, from 1."""

    kind: str  # function, class, section or text
    name: str  # of the function or class, with those around it; the headings of a section
    first: int
    last: int
    text: str
    head: str = ""  # the first line of what this is a later piece of
    part: int = 0  # the number of a part of a line that is too long, from 1


def lines_of(text: str) -> list[str]:
    """The lines of a text, as editors count them: a form feed ends none."""
    return text.split("\n")


def pieces(
    lines: Sequence[str], *, kind: str, name: str, first: int, most: int | None = MAX_CHARACTERS
) -> Iterator[Unit]:
    """Lines as units of at most so many characters, cut at blank lines if there are some; blank ends are left out.

    Args:
        lines: The lines.
        kind: What they are.
        name: Its name.
        first: The number of the first of them.
        most: Most characters of a unit; ``None``: all lines are one.
    """
    head = next((line.strip() for line in lines if _WORD.search(line)), "")[:_HEAD]
    start, begun = 0, False
    while start < len(lines):
        stop = len(lines) if most is None else _stop(lines, start, most)
        text = "\n".join(lines[start:stop])
        if _WORD.search(text):
            while not lines[start].strip():
                start += 1
            last = stop
            while not lines[last - 1].strip():
                last -= 1
            unit = Unit(
                kind=kind,
                name=name,
                first=first + start,
                last=first + last - 1,
                text="\n".join(lines[start:last]),
                head=head if begun else "",
            )
            begun = True
            yield from [unit] if most is None or len(unit.text) <= most else _parts(unit, most)
        start = stop


def _stop(lines: Sequence[str], start: int, most: int) -> int:
    """Where the piece that begins at a line ends: as late as it may, but rather at a blank line."""
    size, blank = 0, start
    for index in range(start, len(lines)):
        size += len(lines[index]) + 1
        if size > most + 1 and index > start:
            return blank if blank > start else index
        if not lines[index].strip() and 2 * size > most:
            blank = index
    return len(lines)


def _parts(unit: Unit, most: int) -> Iterator[Unit]:
    """A line that is too long by itself, in parts."""
    for part, start in enumerate(range(0, len(unit.text), most), start=1):
        yield replace(unit, text=unit.text[start : start + most], part=part)
