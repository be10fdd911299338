"""Giants: texts of many times what a model reads, of which no more is tokenized than it takes to know that.

A tokenizer takes some two hundred bytes a character: a text of a whole request's size would take gigabytes, only for
all but its beginning to be cut, or for it to be refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millpond.engine.input.text_tokenizer import TextTokenizer
from millpond.inputs import Item, Pair, size_of
from millpond.tasks import Truncate

# A text of fewer characters, or of fewer for each token that is read, is tokenized whole: that takes a moment.
_FEW = 1 << 18
_FEW_PER_TOKEN = 64
# The first part looked at, in characters for each token that is read: English has four to five.
_FIRST_PER_TOKEN = 16
_GROWTH = 4
# Tokens that a part must have besides twice what is read: where it was cut, a few may be others than in the whole.
_MARGIN = 128
# Characters that are tokenized at a time, of however many items.
_AT_ONCE = 1 << 20


def is_giant(text: str, limit: int) -> bool:
    """Whether ``text`` is long enough to be looked at in part, where ``limit`` tokens are read."""
    return len(text) > max(_FEW, _FEW_PER_TOKEN * limit)


def part_of(text: str, tokenizer: TextTokenizer, *, limit: int, truncate: Truncate) -> str:
    """A part of a giant that has more than twice ``limit`` tokens by itself; the whole where none has.

    The part that truncation keeps: the beginning, or for ``start`` the end. What is cut off it, or refused, is so for
    the whole text as well: more text behind a part changes its last tokens at most.
    """
    size = _FIRST_PER_TOKEN * (limit + _MARGIN)
    while is_giant(text, limit) and size < len(text):
        part = _beginning(text, size) if truncate != "start" else _end(text, size)
        if tokenizer.count(part) > 2 * limit + _MARGIN:
            return part
        size *= _GROWTH
    return text


def lessened(item: Item, tokenizer: TextTokenizer, *, limit: int, truncate: Truncate) -> Item:
    """``item`` with parts in the place of giants; texts with spans stay, since these may lie anywhere."""
    if isinstance(item, str):
        return part_of(item, tokenizer, limit=limit, truncate=truncate)
    if isinstance(item, Pair):
        return Pair(*(part_of(text, tokenizer, limit=limit, truncate=truncate) for text in item))
    return item


def bunches(items: Sequence[Item]) -> Iterator[range]:
    """Which items are tokenized together: as many as have few characters in all, and one at least."""
    first = characters = 0
    for i, item in enumerate(items):
        characters += size_of(item)
        if characters > _AT_ONCE and i > first:
            yield range(first, i)
            first, characters = i, size_of(item)
    if first < len(items):
        yield range(first, len(items))


def _beginning(text: str, size: int) -> str:
    """About ``size`` characters, up to the end of a word: few tokens reach over that."""
    middle = size // 2
    words = text[middle : text.rfind(" ", middle, size) + 1].rstrip()
    return text[: middle + len(words) if words else size]


def _end(text: str, size: int) -> str:
    place = text.find(" ", len(text) - size, len(text) - size // 2)
    return text[place if place > 0 else len(text) - size :]
