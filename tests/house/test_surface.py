"""Every public name has its recorded signature and a docstring, and a test uses it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from difflib import unified_diff
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from tests.house.signatures import PACKAGES, own_members, surface

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = [ROOT / "tests", *(ROOT / "integrations").glob("*/tests")]

NAMES = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]


def public(path: str) -> Any:
    package, _, name = path.rpartition(".")
    return getattr(importlib.import_module(package), name)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, including those of millpond base classes."""
    for name, member in own_members(cls).items():
        plain = getattr(member, "__func__", member)
        if not name.startswith("_") and (inspect.isfunction(plain) or isinstance(member, property | cached_property)):
            yield name, member


def test_the_signatures_are_as_recorded():
    recorded = (HERE / "signatures.txt").read_text(encoding="utf-8").splitlines()
    difference = "\n".join(unified_diff(recorded, surface(), "signatures.txt", "the code", lineterm="", n=0))
    assert not difference, (
        f"{difference}\nif this is intended: python tests/house/signatures.py > tests/house/signatures.txt"
    )


@pytest.mark.parametrize(
    "path", [path for path in NAMES if inspect.isroutine(public(path)) or inspect.isclass(public(path))]
)
def test_every_public_name_is_documented(path: str):
    value = public(path)
    document = value.__doc__ or ""
    assert len(document) > 20, f"{path} has no docstring"
    assert not document.startswith(f"{value.__name__}("), f"{path} has a generated docstring"
    if dataclasses.is_dataclass(value):
        missing = [field.name for field in dataclasses.fields(value) if field.repr and field.name not in document]
        assert not missing, f"{path} does not say what {missing} are"
        return
    document += getattr(value, "__init__", value).__doc__ or ""
    if "Args:" in document:
        missing = [
            name for name in inspect.signature(value).parameters if not re.search(rf"^ +(\*\*)?{name}:", document, re.M)
        ]
        assert not missing, f"{path} does not say what {missing} are"


@pytest.mark.parametrize("path", [path for path in NAMES if inspect.isclass(public(path))])
def test_every_public_method_is_documented(path: str):
    undocumented = [name for name, member in members(public(path)) if not inspect.getdoc(member)]
    assert not undocumented, f"{path}: {undocumented} have no docstring"


@pytest.fixture(scope="module")
def sources_of_tests() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for folder in TESTS for file in folder.rglob("*.py"))


@pytest.mark.parametrize("path", NAMES)
def test_every_public_name_is_used_in_a_test(path: str, sources_of_tests: str):
    assert re.search(rf"\b{path.rpartition('.')[2]}\b", sources_of_tests), f"no test mentions {path}"
