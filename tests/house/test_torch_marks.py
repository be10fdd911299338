"""Tests marked `torch`, which `make test-light` leaves out, do need torch; the others are run by it without."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import MARKED_TORCH, TORCH

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("tests", "integrations")
    for path in (ROOT / folder).rglob("test_*.py")
    if TORCH.isdisjoint((path.relative_to(ROOT), *path.relative_to(ROOT).parents))
)
# What needs torch: its packages, the helpers that import it, and checkpoints in its own format.
NEEDS = re.compile(
    r"\b(torch|transformers|sentence_transformers|recording|test_against_torch|HuggingFace\w*|SentenceTransformer\w*)\b"
    r"|'(bin|gpt2|jamba|streams)'|\"(bin|gpt2|jamba|streams)\""
)


def marked(tree: ast.Module) -> Iterator[Any]:
    for node in ast.walk(tree):
        functions = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if functions and any("mark.torch" in ast.unparse(decorator) for decorator in node.decorator_list):
            yield node


def reached(node: ast.AST, tree: ast.Module) -> str:
    """The text of a function without its marks, and of everything in its module that it names, by any way."""
    defined = {
        name.id if isinstance(name, ast.Name) else name.name: node
        for node in tree.body
        for name in (getattr(node, "targets", [getattr(node, "target", node)]))
        if isinstance(name, ast.Name | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    texts, found, waiting = [], set(), [node]
    while waiting:
        current = waiting.pop()
        texts.append(ast.unparse(current))
        names = {part.id for part in ast.walk(current) if isinstance(part, ast.Name)}
        names |= {part.arg for part in ast.walk(current) if isinstance(part, ast.arg)}
        waiting += [defined[name] for name in names & defined.keys() - found]
        found |= names
    return "\n".join(texts).replace("pytest.mark.torch", "")


def unneeded(path: Path) -> list[str]:
    """The marked tests of a file that need no torch."""
    text = path.read_text(encoding="utf-8")
    if MARKED_TORCH.search(text):
        return [] if NEEDS.search(text.replace("pytest.mark.torch", "")) else [path.name]
    tree = ast.parse(text)
    return [f"{path.name}::{test.name}" for test in marked(tree) if not NEEDS.search(reached(test, tree))]


def test_what_is_marked_needs_torch() -> None:
    assert sum("mark.torch" in path.read_text(encoding="utf-8") for path in FILES) > 20
    assert [name for path in FILES for name in unneeded(path)] == []


def test_every_entry_of_the_list_exists() -> None:
    assert [str(path) for path in TORCH if not (ROOT / path).exists()] == []
