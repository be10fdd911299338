"""docs/gpu.md: the table of memory follows from its own formula, and what it names exists."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from millpond.attention.self_check import LEAST, LENGTHS
from millpond.engine.engine import _GPU_BATCH_TOKENS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([\d,]+) M \|(.+)\|$", PAGE, re.MULTILINE)


def formula() -> dict:
    (block,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(block, names)
    return names


@pytest.mark.parametrize(("name", "parameters", "cells"), ROWS, ids=[row[0] for row in ROWS])
def test_the_table_of_memory_is_computed(name, parameters, cells):
    names = formula()
    shape = names["SHAPES"][name]
    half, whole = names["gibibytes"](*shape), names["gibibytes"](*shape, bytes_each=4)
    expected = [
        f"{number:.{digits}f} GiB"
        for numbers in (half, whole)
        for number, digits in zip(numbers, (2, 2, 1), strict=True)
    ]
    assert [cell.strip() for cell in cells.split("|")] == expected
    assert f"{half[0] * 2**30 / 2 / 1e6:,.0f}" == parameters


def test_every_shape_has_a_row():
    assert len(ROWS) == 6 and {row[0] for row in ROWS} == formula()["SHAPES"].keys()


def test_the_page_names_what_the_code_does():
    assert f"{_GPU_BATCH_TOKENS:,}" in PAGE
    assert f"random texts of {', '.join(map(str, LENGTHS[:-1]))} and {LENGTHS[-1]} tokens" in PAGE
    assert f"below {LEAST}" in PAGE


@pytest.mark.parametrize("variable", sorted(set(re.findall(r"MILLPOND_\w+", PAGE))))
def test_every_variable_is_read_somewhere(variable):
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert any(variable in source for source in sources)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([\w-]+)", PAGE))))
def test_every_target_is_in_the_makefile(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_scripts_exist():
    scripts = set(re.findall(r"benchmarks/[\w/]+\.py", PAGE))
    assert scripts and all(os.path.exists(ROOT / script) for script in scripts)
