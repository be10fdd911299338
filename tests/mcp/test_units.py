"""Units of Markdown and text."""

from __future__ import annotations

import random
import re

import pytest

from millpond.ingest.units.split import split
from millpond.ingest.units.unit import MAX_CHARACTERS
from millpond.mcp.folder.words import expression, words

DOCUMENT = """---
title: no heading
---
before

# One
text of one

## Two ##
```sh
# no heading
```
text of two

Three
-----
text of three
| a |
| --- |

# Four
"""


def test_sections_are_named_by_their_headings():
    found = [(unit.name, unit.first, unit.last) for unit in split("a.md", DOCUMENT)]
    assert found == [
        ("", 1, 4),
        ("One", 6, 7),
        ("One > Two", 9, 13),
        ("One > Three", 15, 19),
        ("Four", 21, 21),
    ]


@pytest.mark.parametrize("name", ["a.md", "a.txt", "b.rst"])
@pytest.mark.parametrize("seed", range(5))
def test_every_line_with_a_word_is_in_one_unit(name: str, seed: int):
    chance = random.Random(seed)
    pieces = ["# heading", "", "", "word " * 40, "x", "```", "---", "ä" * 3000, "  indented", "| a | b |", "\r"]
    text = "\n".join(chance.choice(pieces) for _ in range(300))
    lines = text.split("\n")
    covered: dict[int, str] = {}
    for unit in split(name, text):
        assert len(unit.text) <= MAX_CHARACTERS
        if unit.part:
            assert unit.first == unit.last
            covered[unit.first] = covered.get(unit.first, "") + unit.text
            continue
        assert unit.text == "\n".join(lines[unit.first - 1 : unit.last])
        for line in range(unit.first, unit.last + 1):
            assert line not in covered
            covered[line] = lines[line - 1]
    missing = [n for n, line in enumerate(lines, 1) if re.search(r"\w", line) and covered.get(n) != line]
    assert not missing


def test_words_of_identifiers():
    assert words("getUserName HTTPServer2 snake_case plain") == [
        *["getusername", "get", "user", "name"],
        *["httpserver2", "http", "server", "2"],
        *["snake_case", "snake", "case", "plain"],
    ]
    assert expression('what"s (this) OR') == '"what" OR "this" OR "or" OR "s"'
    assert expression("?!") is None
