"""Units of code, by the grammars of tree-sitter that `millpond mcp` has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.door

SOURCES = {
    "python": (
        "a.py",
        "@cached\ndef find(x):\n    return x\n\n\nclass Box:\n    y = 1\n",
        ["function find 1-3", "class Box 6-7"],
    ),
    "javascript": (
        "a.js",
        "export const find = (x) => {\n  return x;\n};\nfunction other() {}\n",
        ["function find 1-3", "function other 4-4"],
    ),
    "typescript": (
        "a.ts",
        "interface Shape {\n  area(): number;\n}\nfunction find(): void {}\n",
        ["class Shape 1-3", "function find 4-4"],
    ),
    "tsx": (
        "a.tsx",
        "export function App() {\n  return <p>hi</p>;\n}\n",
        ["function App 1-3"],
    ),
    "go": (
        "a.go",
        "// Move moves.\nfunc (p *Point) Move() {\n}\ntype Point struct {\n}\n",
        ["function Move 1-3", "class Point 4-5"],
    ),
    "rust": (
        "a.rs",
        "#[test]\nfn find() {\n}\nstruct Point { x: i32 }\n",
        ["function find 1-3", "class Point 4-4"],
    ),
    "java": (
        "A.java",
        "class A {\n  int f() { return 1; }\n}\nenum E { X }\n",
        ["class A 1-3", "class E 4-4"],
    ),
    "c": (
        "a.c",
        "static int *find(int a) {\n  return 0;\n}\nstruct point { int x; };\n",
        ["function find 1-3", "class point 4-4"],
    ),
    "cpp": (
        "a.cpp",
        "template <class T>\nT add(T a) { return a; }\nint C::g() { return 1; }\n",
        ["function add 1-2", "function C::g 3-3"],
    ),
    "csharp": (
        "a.cs",
        "class A {\n  int F() { return 1; }\n}\ninterface B { }\n",
        ["class A 1-3", "class B 4-4"],
    ),
    "ruby": (
        "a.rb",
        "# finds\ndef find(x)\n  x\nend\nclass B\nend\n",
        ["function find 1-4", "class B 5-6"],
    ),
    "php": (
        "a.php",
        "<?php\nfunction find($x) { return $x; }\nclass B { }\n",
        ["function find 1-2", "class B 3-3"],
    ),
    "bash": (
        "a.sh",
        "# says hi\nhi() {\n  echo hi\n}\n",
        ["function hi 1-4"],
    ),
}


@pytest.mark.parametrize("language", SOURCES)
def test_code_is_cut_at_its_functions_and_classes(language: str):
    from millpond.ingest.units.languages import GRAMMARS
    from millpond.ingest.units.split import language_of, split

    assert set(SOURCES) == set(GRAMMARS)
    name, text, expected = SOURCES[language]
    assert language_of(name) == language
    assert [f"{unit.kind} {unit.name} {unit.first}-{unit.last}" for unit in split(name, text)] == expected


def test_methods_of_a_large_class_are_units_and_every_line_is_in_one():
    from millpond.ingest.units.split import split

    root, checked, methods = Path(__file__).parents[2], 0, set()
    for path in sorted([*(root / "src").rglob("*.py"), *(root / "src").rglob("*.cpp"), *(root / "src").rglob("*.h")]):
        text = path.read_text()
        covered: set[int] = set()
        for unit in split(path.name, text):
            assert unit.part or unit.text == "\n".join(text.split("\n")[unit.first - 1 : unit.last])
            lines = set(range(unit.first, unit.last + 1))
            assert unit.part or covered.isdisjoint(lines), (path, unit)
            covered |= lines
            methods.add(unit.name)
        missing = [n for n, line in enumerate(text.split("\n"), 1) if re.search(r"\w", line) and n not in covered]
        assert not missing, (path, missing)
        checked += 1
    assert checked > 300 and {"Engine.close", "MemoryIndex._search"} <= methods
