"""Oversize texts: many times longer than a model reads, tokenized only as far as needed to know that.

A tokenizer takes about two hundred bytes per character: a text as large as a whole request would take gigabytes, only
for all but its beginning to be cut, or for the text to be refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millpond.engine.input.text_tokenizer import TextTokenizer
from millpond.inputs import Item, Pair, size_of
from millpond.tasks import Truncate

# Shorter texts are tokenized whole, which takes a moment: fewer characters than this, or fewer than this per token
# that is read.
_WHOLE_CHARACTERS = 1 << 18
_WHOLE_PER_TOKEN = 64
# Characters of the first part that is tokenized, for each token that is read: English has four to five.
_FIRST_PER_TOKEN = 16
_GROWTH = 4
# A part must have this many tokens more than twice the limit: near its cut, a few may differ from those of the whole.
_MARGIN = 128
# Most characters that are tokenized at a time, over any number of items.
_BATCH_CHARACTERS = 1 << 20


def is_oversize(text: str, limit: int) -> bool:
    """Whether ``text`` is so long that a part of it is tokenized first, for a limit of ``limit`` tokens."""
    return len(text) > max(_WHOLE_CHARACTERS, _WHOLE_PER_TOKEN * limit)


def part_of(text: str, tokenizer: TextTokenizer, *, limit: int, truncate: Truncate) -> str:
    """A part of an oversize text that has more than twice ``limit`` tokens; the whole text if no part has.

    It is the part that truncation keeps: the beginning, or for ``start`` the end. If the part is cut or refused, so is
    the whole text: text after a part changes at most its last tokens.
    """
    size = _FIRST_PER_TOKEN * (limit + _MARGIN)
    while is_oversize(text, limit) and size < len(text):
        part = _beginning(text, size) if truncate != "start" else _end(text, size)
        if tokenizer.count(part) > 2 * limit + _MARGIN:
            return part
        size *= _GROWTH
    return text


def reduced(item: Item, tokenizer: TextTokenizer, *, limit: int, truncate: Truncate) -> Item:
    """``item`` with oversize texts replaced by parts; texts with spans stay whole, since a span may lie anywhere."""
    if isinstance(item, str):
        return part_of(item, tokenizer, limit=limit, truncate=truncate)
    if isinstance(item, Pair):
        return Pair(*(part_of(text, tokenizer, limit=limit, truncate=truncate) for text in item))
    return item


def bunches(items: Sequence[Item]) -> Iterator[range]:
    """Indices of the items that are tokenized together: few characters in all, and at least one item."""
    first = characters = 0
    for i, item in enumerate(items):
        characters += size_of(item)
        if characters > _BATCH_CHARACTERS and i > first:
            yield range(first, i)
            first, characters = i, size_of(item)
    if first < len(items):
        yield range(first, len(items))


def _beginning(text: str, size: int) -> str:
    """About ``size`` characters, up to the end of a word: few tokens reach over one."""
    middle = size // 2
    words = text[middle : text.rfind(" ", middle, size) + 1].rstrip()
    return text[: middle + len(words) if words else size]


def _end(text: str, size: int) -> str:
    """About the last ``size`` characters, from the beginning of a word on."""
    space = text.find(" ", len(text) - size, len(text) - size // 2)
    return text[space if space > 0 else len(text) - size :]
