"""docs/structure.md lists every module in the line of its folder, and no module that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "structure.md"
# Folders whose files the map lists one by one, and the endings of these files.
ADAPTERS = ("langchain", "llama-index", "qdrant", "milvus", "lancedb", "pgvector")
LISTED = ("src/millpond", *(f"integrations/{name}" for name in ADAPTERS))
ENDINGS = {".py", ".cpp", ".h"}
IGNORED_FOLDERS = {"tests", "__pycache__"}


def modules_of_tree(root: Path = ROOT) -> set[str]:
    """Every module under the listed folders, as ``folder/name``; the ``__init__`` of a folder is the folder itself."""
    return {
        path.relative_to(root).with_suffix("").as_posix()
        for folder in LISTED
        for path in (root / folder).rglob("*")
        if path.suffix in ENDINGS
        and path.stem not in ("__init__", "hatch_build")
        and not IGNORED_FOLDERS & set(path.relative_to(root).parts)
    }


def modules_of_map(page: str) -> set[str]:
    """Every module that the map lists.

    The map is the first fenced block. A word that ends in ``/`` opens a folder, and the words after it are its modules.
    An indented folder lies in the folder of the closest line above with less indentation. Text in parentheses and
    arrows between modules are comments.
    """
    block = page.split("```")[1]
    modules: set[str] = set()
    parents: list[tuple[int, str]] = []  # indentation and path of the folders that are open
    for line in block.splitlines():
        text = re.sub(r"\([^)]*\)", " ", line)
        words = re.findall(r"[\w./-]+", text)
        if not words:
            continue
        indent = len(line) - len(line.lstrip())
        parents = [(depth, path) for depth, path in parents if depth < indent]
        above = parents[-1][1] if parents else ""
        folder = above
        for word in words:
            if word.endswith("/"):
                folder = f"{above}{word}"
                parents.append((indent, folder))
            else:
                modules.add(f"{folder}{word}")
    return {name for name in modules if name.startswith(tuple(f"{folder}/" for folder in LISTED))}


def test_the_map_lists_exactly_the_modules():
    assert modules_of_map(PAGE.read_text(encoding="utf-8")) == modules_of_tree()


def test_the_map_is_short():
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize(
    ("block", "modules"),
    [
        ("src/millpond/ a  b", {"src/millpond/a", "src/millpond/b"}),
        (
            "src/millpond/ a (the face) > b\n  engine/ c | d",
            {f"src/millpond/{name}" for name in ("a", "b", "engine/c", "engine/d")},
        ),
        (
            "src/millpond/ a\n  engine/ c  input/ d\n    cuda/ e\n  f",
            {f"src/millpond/{name}" for name in ("a", "engine/c", "input/d", "input/cuda/e", "f")},
        ),
    ],
)
def test_the_map_is_parsed(block: str, modules: set[str]):
    assert modules_of_map(f"# Map\n```\n{block}\n```\n") == modules
