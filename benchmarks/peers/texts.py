"""Workloads of real text: docstrings of Python's standard library, and books if the data folder has them.

Lengths count tokens of the model's own tokenizer, including special tokens. No text is longer than its workload says,
so every engine reads the same tokens; only the workload `long` is cut by the engines, all at the same limit.
"""

from __future__ import annotations

import ast
import functools
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Docstrings of the workload `docs` are cut here, at a length below every engine's own limit.
DOCS_LIMIT = 256
# Texts of each workload in a full run: 30 to 60 thousand tokens; seconds for the fastest engine, 10 for the slowest.
COUNTS = {"short": 3000, "docs": 1000, "passages": 250, "mixed": 180, "long": 80}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Texts of one kind.

    Attributes:
        name: A key of ``COUNTS``.
        texts: ``n`` texts.
        lengths: ``n`` token counts after truncation at the model's limit.
    """

    name: str
    texts: tuple[str, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Total number of tokens."""
        return sum(self.lengths)

    def head(self, count: int) -> Workload:
        """The first ``count`` texts."""
        return Workload(name=self.name, texts=self.texts[:count], lengths=self.lengths[:count])

    def between(self, least: int, most: int) -> Workload:
        """The texts of ``least`` to ``most`` tokens."""
        chosen = [i for i, length in enumerate(self.lengths) if least <= length <= most]
        texts, lengths = tuple(self.texts[i] for i in chosen), tuple(self.lengths[i] for i in chosen)
        return Workload(name=self.name, texts=texts, lengths=lengths)


class Texts:
    """Workloads whose lengths are counted with one tokenizer.

    Args:
        tokenizer: Path of a tokenizer.json.
        data: A folder with ``longdocs/*.txt``; without it, running text is taken from the docstrings.
    """

    def __init__(self, tokenizer: Path, *, data: Path | None) -> None:
        from tokenizers import Tokenizer

        self.tokenizer: Any = Tokenizer.from_file(str(tokenizer))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        books = sorted((data / "longdocs").glob("*.txt")) if data is not None else []
        self.source = "books" if books else "docstrings of the standard library"
        texts = [path.read_text(encoding="utf-8") for path in books] or list(docstrings())
        self.running = " ".join(" ".join(texts).split())
        self._encoded: Any = None

    def workload(self, name: str, *, limit: int, count: int | None = None) -> Workload:
        """The workload ``name`` for a model with a limit of ``limit`` tokens per text."""
        count = COUNTS[name] if count is None else count
        chance = random.Random(name)
        if name == "docs":
            texts = [self._shorten(text, DOCS_LIMIT) for text in docstrings()[:count]]
        else:
            texts = self.pieces([LENGTHS[name](chance) for _ in range(count)], chance)
        lengths = [min(len(one.ids), limit) for one in self.tokenizer.encode_batch(texts)]
        return Workload(name=name, texts=tuple(texts), lengths=tuple(lengths))

    def pieces(self, lengths: Sequence[int], chance: random.Random) -> list[str]:
        """Distinct pieces of the running text from random positions: whole words, at most ``lengths`` tokens."""
        if self._encoded is None:
            self._encoded = self.tokenizer.encode(self.running, add_special_tokens=False)
        words, offsets = self._encoded.word_ids, self._encoded.offsets
        special = self.tokenizer.num_special_tokens_to_add(False)
        pieces: dict[str, None] = {}
        for length in lengths:
            before = len(pieces)
            while len(pieces) == before:  # an engine may compute equal texts once
                start = chance.randrange(len(words) - length)
                while start and words[start] == words[start - 1]:
                    start -= 1
                end = start + length - special
                while end > start + 1 and words[end] == words[end - 1]:
                    end -= 1
                pieces[self.running[offsets[start][0] : offsets[end - 1][1]]] = None
        return list(pieces)

    def _shorten(self, text: str, limit: int) -> str:
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        kept = limit - self.tokenizer.num_special_tokens_to_add(False)
        return text if len(encoded.ids) <= kept else text[: encoded.offsets[kept - 1][1]]


LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "short": lambda chance: chance.randint(5, 16),
    "passages": lambda chance: min(max(round(chance.gauss(183, 60)), 60), 400),
    "mixed": lambda chance: chance.randint(10, 500),
    "long": lambda chance: 2048,
}


@functools.cache
def docstrings() -> tuple[str, ...]:
    """Distinct docstrings of the standard library, in an order that depends only on the Python version."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = list(dict.fromkeys(text for path in paths for text in _docstrings_of(path) if len(text) > 20))
    random.Random(0).shuffle(texts)
    return tuple(texts)


def _docstrings_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield ast.get_docstring(node) or ""
