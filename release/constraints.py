"""Writes constraints.txt: the installed versions, and the pins of what is required and not installed here.

    python -m release.constraints

The libraries of `millpond mcp` are in the folder of `make test-doors` alone, and torchao where a GPU is: what is pinned
for them stays, with the version that tests/doors/requirements.txt has.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def pins(text: str) -> dict[str, str]:
    """The lines ``name==version`` by the normalized name."""
    lines = re.findall(r"^[\w.-]+==\S+", text, re.MULTILINE)
    return {canonicalize_name(line.partition("==")[0]): line for line in lines}


def required() -> set[str]:
    """The normalized names of all that a package of this repository requires, with all extras."""
    names = set()
    for path in (ROOT / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {}).values()
        names |= {canonicalize_name(Requirement(line).name) for line in chain(project["dependencies"], *extras)}
    return names


def merged(
    installed: Mapping[str, str], former: Mapping[str, str], doors: Mapping[str, str], required: Collection[str]
) -> list[str]:
    """The lines of constraints.txt: former ones stay if their package is not installed, but still required.

    Args:
        installed: Pins of what is installed.
        former: Pins of constraints.txt.
        doors: Pins of tests/doors/requirements.txt.
        required: Names that a package requires.
    """
    kept = {name: doors.get(name, line) for name, line in former.items() if name in required or name in doors}
    return sorted({**kept, **installed}.values(), key=lambda line: line.partition("==")[0].lower())


def write(lines: Iterable[str]) -> None:
    """Write constraints.txt."""
    (ROOT / "constraints.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    freeze = [sys.executable, "-m", "pip", "--disable-pip-version-check", "freeze", "--exclude-editable"]
    frozen = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    write(
        merged(
            pins(re.sub(r"\+[a-z0-9.]*$", "", frozen, flags=re.MULTILINE)),  # a build of torch has its own version
            pins((ROOT / "constraints.txt").read_text(encoding="utf-8")),
            pins((ROOT / "tests" / "doors" / "requirements.txt").read_text(encoding="utf-8")),
            required(),
        )
    )
