"""Retrieval sets made of documentation: docstrings and doc pages of the standard library and the installed packages.

A known-item query is the first sentence of a docstring; its passage is the rest of that docstring, so that a passage
does not begin with the words of its query. The sets are the same for a given environment, and different in another one.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGES = {".md", ".rst", ".txt"}
LARGEST_PAGE = 400_000  # bytes; larger text files are data
SECTION = re.compile(r"\n\s*\n\s*\n|\n#+ ")
SENTENCE = re.compile(r"([A-Z][^.\n]{15,140})\.\s+(.{200,})", re.DOTALL)
QUERY_WORDS = range(4, 21)
LEAST_WORDS = 8


@dataclass(frozen=True, kw_only=True)
class PassageSet:
    """Passages with known-item queries.

    Attributes:
        passages: ``n`` distinct texts.
        queries: ``q`` texts.
        relevant: ``q`` indices of the passage that belongs to each query.
    """

    passages: tuple[str, ...]
    queries: tuple[str, ...]
    relevant: tuple[int, ...]


@functools.cache
def documentation(folders: tuple[Path, ...] | None = None) -> tuple[str, ...]:
    """Docstrings and sections of doc pages under ``folders``, in the order of their paths.

    The default is the standard library and the installed packages.
    """
    if folders is None:
        folders = (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")))
    texts: list[str] = []
    seen: set[bytes] = set()
    for folder in dict.fromkeys(folders):
        for path in sorted(folder.rglob("*")):
            if path.suffix != ".py" and path.suffix not in PAGES:
                continue
            try:
                content = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.blake2b(content.encode()).digest()
            if digest not in seen:
                seen.add(digest)
                texts += _docstrings(content) if path.suffix == ".py" else _sections(content)
    return tuple(texts)


def _docstrings(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes of other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text.split()) >= LEAST_WORDS:
                yield text


def _sections(page: str) -> Iterator[str]:
    if len(page) <= LARGEST_PAGE:
        yield from (section for section in SECTION.split(page) if len(section.split()) >= LEAST_WORDS)


@dataclass(kw_only=True)
class _Collection:
    passages: list[str] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)

    def add(self, text: str) -> int | None:
        """The index of the new passage, or None if it is too short or already there but for case and punctuation."""
        key = hashlib.blake2b(" ".join(re.findall(r"\w+", text.lower())).encode(), digest_size=16).digest()
        if key in self.keys or len(text.split()) < LEAST_WORDS:
            return None
        self.keys.add(key)
        self.passages.append(text)
        return len(self.passages) - 1


def short_passages(texts: Sequence[str], tokenizer: Any, *, count: int, queries: int, tokens: int = 60) -> PassageSet:
    """``count`` passages of at most ``tokens`` tokens: every text in consecutive pieces."""
    chance = random.Random(7)
    texts = chance.sample(texts, len(texts))
    collection, asked = _Collection(), []
    for text in texts:
        query, rest = _known_item(text) if len(asked) < queries else (None, "")
        if query is not None:
            at = collection.add(_pieces(rest, tokenizer, tokens)[0])
            if at is not None:
                asked.append((query, at))
            continue
        for piece in _pieces(text, tokenizer, tokens):
            collection.add(piece)
        if len(collection.passages) > 2 * count and len(asked) == queries:
            break
    return _drawn(collection.passages, asked, count, chance)


def long_passages(texts: Sequence[str], tokenizer: Any, *, count: int, queries: int, mean: int = 177) -> PassageSet:
    """``count`` passages of about ``mean`` tokens (standard deviation 50, 60 to 256), each of another text."""
    chance = random.Random(11)
    collection, asked = _Collection(), []
    for text in chance.sample(texts, len(texts)):
        query, rest = _known_item(text) if len(asked) < queries else (None, "")
        length = min(max(round(chance.gauss(mean, 50)), 60), 256)
        first, *others = _pieces(rest if query is not None else text, tokenizer, length)
        if not others:  # shorter than the drawn length
            continue
        at = collection.add(first)
        if at is not None and query is not None:
            asked.append((query, at))
        if len(collection.passages) >= count and len(asked) == queries:
            break
    return _drawn(collection.passages, asked, count, chance)


def _known_item(text: str) -> tuple[str | None, str]:
    """A query and the text after it; the query is None if the text does not begin with a sentence of 4 to 20 words."""
    match = SENTENCE.match(text)
    if match is None or len(match[1].split()) not in QUERY_WORDS or len(match[2].split()) < 30:
        return None, ""
    return match[1], match[2]


def _pieces(text: str, tokenizer: Any, tokens: int) -> list[str]:
    """Consecutive pieces of at most ``tokens`` tokens including special ones, blanks as single spaces."""
    text = " ".join(text[:20_000].split())
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    step = tokens - tokenizer.num_special_tokens_to_add(False)
    starts = range(0, len(offsets), step)
    return [text[offsets[i][0] : offsets[min(i + step, len(offsets)) - 1][1]] for i in starts] or [""]


def _drawn(passages: list[str], asked: list[tuple[str, int]], count: int, chance: random.Random) -> PassageSet:
    """``count`` of ``passages``, those of the queries among them."""
    must = {at for _, at in asked}
    others = [index for index in range(len(passages)) if index not in must]
    kept = sorted(must.union(chance.sample(others, min(len(others), max(0, count - len(must))))))
    position = {index: at for at, index in enumerate(kept)}
    return PassageSet(
        passages=tuple(passages[index] for index in kept),
        queries=tuple(query for query, _ in asked),
        relevant=tuple(position[at] for _, at in asked),
    )
