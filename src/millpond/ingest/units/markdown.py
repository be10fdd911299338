"""Sections of Markdown, by their headings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from millpond.ingest.units.unit import MAX_CHARACTERS, Unit, lines_of, pieces

_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*\r?$")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*\r?$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def sections(text: str, *, most: int | None = MAX_CHARACTERS) -> Iterator[Unit]:
    """The sections of a document, of at most so many characters; the name of one has the headings above it."""
    lines = lines_of(text)
    path: list[tuple[int, str]] = []
    start = 0
    for index, level, title in _headings(lines):
        yield from _section(lines, start, index, path, most)
        path = [*[each for each in path if each[0] < level], (level, title)]
        start = index
    yield from _section(lines, start, len(lines), path, most)


def _section(lines: list[str], start: int, stop: int, path: list[tuple[int, str]], most: int | None) -> Iterator[Unit]:
    name = " > ".join(title for _, title in path)
    return pieces(lines[start:stop], kind="section", name=name, first=start + 1, most=most)


def _headings(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Number, level and text of each heading that is in no code block."""
    fence = ""
    front = bool(lines) and lines[0].rstrip() == "---"  # of a page's settings, which end with such a line
    for index, line in enumerate(lines):
        if front:
            front = index == 0 or line.rstrip() not in ("---", "...")
            continue
        if mark := _FENCE.match(line):
            if not fence and (mark[1][0] == "~" or "`" not in mark[2]):
                fence = mark[1]
                continue
            if fence and mark[1].startswith(fence) and not mark[2].strip():
                fence = ""
                continue
        if fence:
            continue
        if heading := _HEADING.match(line):
            yield index, len(heading[1]), (heading[2] or "").strip()
        elif index + 1 < len(lines) and _is_title(lines, index) and (under := _UNDERLINE.match(lines[index + 1])):
            yield index, 1 if under[1][0] == "=" else 2, line.strip()


def _is_title(lines: list[str], index: int) -> bool:
    """Whether a line under which a row of = or - makes it a heading is a paragraph of its own."""
    line = lines[index]
    text = bool(line.strip()) and not line.startswith(("    ", "\t", ">", "|", "- ", "* ", "+ ")) and "|" not in line
    return text and not _UNDERLINE.match(line) and (index == 0 or not lines[index - 1].strip())
