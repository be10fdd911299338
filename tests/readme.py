"""The Python blocks of a package's README, run as one program."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


def run_readme(
    test: str, replacements: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str], dict[str, Any]]:
    """How many blocks there are, the lines that they print, and their variables; ``test`` is the calling file."""
    readme = Path(test).parents[1] / "README.md"
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    program = "\n".join(blocks)
    for name, instead in replacements.items():
        assert name in program
        program = program.replace(name, instead)
    scope: dict[str, Any] = {}
    exec(compile(program, str(readme), "exec", dont_inherit=True), scope)
    return len(blocks), capsys.readouterr().out.splitlines(), scope
