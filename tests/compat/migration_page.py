"""The pages of docs/migrate as pairs of code blocks, and what their variables hold as numbers."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAGES = Path(__file__).parents[2] / "docs" / "migrate"
INDEX, SERVERS = PAGES / "index.md", PAGES / "vllm.md"
INPUTS = "every example"
OLD = ("before", "client")
NEW = {"before": "after", "client": "in process"}
# Variables of both blocks that hold no result.
OBJECTS = frozenset(
    """
        answer body client dense embed_model embedder embeddings engine found instructed late model name ranker reranker
    """.split()
)

# What a block needs besides its own imports; ONNX files are exported by the tests.
BEHIND = {
    "fastembed": ("onnx",),
    "flashrank": ("onnx",),
    "FastEmbedEmbeddings": ("fastembed", "onnx"),
    "models.Document(": ("fastembed", "onnx"),
    "FlashRankRerank": ("flashrank", "onnx"),
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two blocks of the page that should compute the same."""

    heading: str
    old: str  # code of the library that is replaced
    new: str
    kind: str  # the title of the old block: before, or client of a server
    number: int  # how many pairs under the same heading come before

    @property
    def name(self) -> str:
        """The heading as a test's id."""
        words = re.sub(r"[^a-z0-9]+", "-", self.heading.lower()).strip("-")
        return words if self.number == 0 else f"{words}-{self.number + 1}"

    def missing(self) -> list[str]:
        """Packages that the old block needs and that are not installed."""
        behind = [package for name, packages in BEHIND.items() if name in self.old for package in packages]
        return [package for package in dict.fromkeys([*_imports(self.old), *behind]) if not _installed(package)]

    @property
    def is_exact(self) -> bool:
        """Whether the new block computes in float32, as the old one does."""
        return "float32" in self.new


def read_all() -> tuple[str, list[Pair]]:
    """The inputs of all examples, and the pairs of every page."""
    read_pages = [
        read(page.read_text(encoding="utf-8"))
        for page in (INDEX, *sorted(PAGES.glob("[!i]*.md")), PAGES / "infinity.md")
    ]
    return read_pages[0][0], [pair for _, pairs in read_pages for pair in pairs]


def read(page: str) -> tuple[str, list[Pair]]:
    """The block with the inputs of all examples, and the pairs, in order; each block has a partner."""
    inputs, pairs, heading = "", [], ""
    waiting: tuple[str, str] | None = None
    for found in re.finditer(r"^#+ (.*)$|^```python *(.*)\n((?s:.*?))^```$", page, re.MULTILINE):
        if found[1] is not None:
            heading = found[1]
            continue
        title = re.fullmatch(r'title="(.*)"', found[2])
        assert title is not None, f"a block under {heading!r} has no title: {found[0]}"
        if waiting is not None:
            assert title[1] == NEW[waiting[0]], f"under {heading!r} {title[1]!r} follows {waiting[0]!r}"
            number = sum(pair.heading == heading for pair in pairs)
            pairs.append(Pair(heading=heading, old=waiting[1], new=found[3], kind=waiting[0], number=number))
            waiting = None
        elif title[1] in OLD:
            waiting = title[1], found[3]
        elif title[1] == INPUTS:
            inputs = found[3]
        else:
            assert title[1] == "keep old vectors", f"under {heading!r} a block is called {title[1]!r}"
    assert waiting is None, f"under {heading!r} {waiting} has no partner"
    return inputs, pairs


def _imports(code: str) -> list[str]:
    """Modules that the code imports."""
    names = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
    return names


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


# --- Results --------------------------------------------------------------------------------------------------------


def results(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a block that hold numbers, in one form whatever library they come from."""
    return {
        name: plain(value)
        for name, value in namespace.items()
        if not (name.startswith("_") or name in OBJECTS or callable(value) or type(value).__name__ == "module")
    }


def plain(value: Any) -> Any:
    """A result as nested lists, arrays, dicts and pairs."""
    import torch

    if hasattr(value, "page_content"):
        score = value.metadata.get("relevance_score")
        return value.page_content, None if score is None else float(score)
    if hasattr(value, "node"):
        return value.node.get_content(), None if value.score is None else float(value.score)
    if hasattr(value, "relevance_score"):
        return value.index, float(value.relevance_score)
    if hasattr(value, "indices") and hasattr(value, "values") and not isinstance(value, torch.Tensor):
        return dict(zip(value.indices.tolist(), value.values.tolist(), strict=True))
    if isinstance(value, torch.Tensor):
        return _rows(value) if value.is_sparse else value.float().numpy()
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, np.ndarray | float | int | str | bool):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "offsets") and hasattr(value, "flat"):  # Ragged
        return list(value)
    if isinstance(value, Sequence):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else [plain(each) for each in value]
    raise TypeError(f"a {type(value).__name__} is no result: {value!r}")


def _mapping(value: Mapping[Any, Any]) -> Any:
    """``{token id: weight}``, or a ranked document of sentence-transformers or FlashRank."""
    for index in ("corpus_id", "id"):
        if index in value:
            return value[index], float(value["score"])
    return {int(key): float(weight) for key, weight in value.items()}


def _rows(matrix: Any) -> list[dict[int, float]]:
    """The rows of a sparse tensor of torch."""
    matrix = matrix.coalesce()
    rows: list[dict[int, float]] = [{} for _ in range(matrix.shape[0])]
    for row, column, weight in zip(*matrix.indices().tolist(), matrix.values().tolist(), strict=True):
        rows[row][column] = weight
    return rows


def assert_pair(old: Mapping[str, Any], new: Mapping[str, Any], *, is_exact: bool = True) -> None:
    """Equal variables: to 1e-5, or else rows of a cosine above 0.999."""
    common = old.keys() & new.keys()
    assert common, (sorted(old), sorted(new))
    for name in common:
        if is_exact:
            assert_same(old[name], new[name], tolerance=1e-5)
        else:
            assert np.min(cosines(old[name], new[name])) > 0.999


def cosines(one: Any, other: Any) -> Any:
    """Row by row: ``[n]`` of two ``[n, d]``."""
    one, other = np.asarray(one), np.asarray(other)
    return (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)


def assert_same(old: Any, new: Any, *, tolerance: float) -> None:
    """Equal structure, strings and keys; numbers within the tolerance. A score that ``old`` lacks is not compared."""
    if isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        np.testing.assert_allclose(np.asarray(old), np.asarray(new), atol=tolerance, rtol=tolerance)
    elif isinstance(old, dict):
        assert old.keys() == new.keys()
        for key in old:
            assert_same(old[key], new[key], tolerance=tolerance)
    elif isinstance(old, list | tuple):
        assert len(old) == len(new)
        for one, other in zip(old, new, strict=True):
            assert_same(one, other, tolerance=tolerance)
    elif isinstance(old, float):
        assert abs(old - new) <= tolerance * max(1.0, abs(old)), (old, new)
    elif old is not None:
        assert old == new
