"""Oversize texts: many times longer than a model reads, tokenized only as far as needed to know that.

A tokenizer takes about two hundred bytes per character: a text as large as a whole request would take gigabytes, only
for all but its beginning to be cut, or for the text to be refused. What is kept of it is always what would be kept of
the whole: where no part is proven to have the same tokens, the whole text is tokenized, once and in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from millpond.engine.heap import HEAP
from millpond.engine.input.long_runs import Excerpt
from millpond.engine.input.text_tokenizer import TextTokenizer
from millpond.inputs import Item, Pair, SpannedText, TokenIds, size_of, text_of
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


def part_of(
    text: str,
    tokenizer: TextTokenizer,
    *,
    limit: int,
    truncate: Truncate,
    prompt: str = "",
    more_than: int = 0,
    aligned: bool = False,
) -> Excerpt:
    """An excerpt of a part of an oversize text that has more than twice ``limit`` tokens; of the whole, if no part has.

    It is of the part that truncation keeps: the beginning, or for ``start`` the end. The tokens that truncation keeps
    of it are those that it keeps of the whole, and if the excerpt is cut or refused, so is the whole text.

    Args:
        text: The text.
        tokenizer: The checkpoint's.
        limit: Most tokens that are read.
        truncate: Which end of the text is cut.
        prompt: What will be put before the text; without it, for ``start``.
        more_than: The excerpt of a part also has more tokens than this.
        aligned: Whether the tokens that truncation keeps must have the same offsets too.
    """
    if not is_oversize(text, limit):
        return Excerpt.of(text)
    HEAP.trim_soon()
    enough = max(2 * limit + _MARGIN, more_than)
    normalized = cache(lambda: tokenizer.lookahead.normalize(prompt + text))
    size = _FIRST_PER_TOKEN * (limit + _MARGIN)
    while 2 * size < len(text):  # more than half of a text costs more than it saves
        if truncate == "start":
            part = _end(text, size, tokenizer, enough)
        else:
            part = _beginning(text, size, tokenizer, enough, limit, prompt, normalized, aligned)
        if part is not None:
            return part
        size *= _GROWTH
    return tokenizer.shorten(text)


def reduced(
    item: Item, tokenizer: TextTokenizer, *, limit: int, truncate: Truncate, prompt: str = "", aligned: bool = False
) -> Item:
    """``item`` with oversize texts replaced by excerpts of parts.

    Args:
        item: The item.
        tokenizer: The checkpoint's.
        limit: Most tokens that are read.
        truncate: Which end of the item is cut.
        prompt: What will be put before a text.
        aligned: Whether characters of the text are counted: then a part is its beginning as it is.
    """
    if isinstance(item, Pair):
        return _reduced_pair(item, tokenizer, limit, truncate)
    if isinstance(item, TokenIds):
        return item
    text = text_of(item)
    part = part_of(text, tokenizer, limit=limit, truncate=truncate, prompt=prompt, aligned=aligned)
    kept = text[: part.end] if aligned else part.text
    return replace(item, text=kept) if isinstance(item, SpannedText) else kept


def _reduced_pair(pair: Pair, tokenizer: TextTokenizer, limit: int, truncate: Truncate) -> Pair:
    """``pair`` with its oversize texts replaced by excerpts; that of the longer text stays the longer one."""
    parts = [part_of(text, tokenizer, limit=limit, truncate=truncate).text for text in pair]
    counts = [tokenizer.count(part) for part in parts]
    if truncate != "error" and min(counts) > limit:  # both are cut, and the longer one may keep a token more
        whole = [tokenizer.count(text) for text in pair]
        longer = 0 if whole[0] > whole[1] else 1
        more_than = counts[1 - longer]
        parts[longer] = part_of(pair[longer], tokenizer, limit=limit, truncate=truncate, more_than=more_than).text
    return Pair(*parts)


def all_small(items: Sequence[Item]) -> bool:
    """Whether no item is oversize, and all of them are one bunch."""
    return sum(map(size_of, items)) <= min(_WHOLE_CHARACTERS, _BATCH_CHARACTERS)


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


def _beginning(
    text: str,
    size: int,
    tokenizer: TextTokenizer,
    enough: int,
    limit: int,
    prompt: str,
    normalized: Callable[[], str],
    aligned: bool,
) -> Excerpt | None:
    """The first ``size`` characters, if they have more than ``enough`` tokens, and the first ``limit`` are settled."""
    part = tokenizer.shorten(text[:size])
    if tokenizer.count(part.text) <= enough:
        return None
    settled = tokenizer.lookahead.settles(prompt + part.text, limit, normalized, aligned=aligned)
    return part if settled else None


def _end(text: str, size: int, tokenizer: TextTokenizer, enough: int) -> Excerpt | None:
    """The last ``size`` characters, if they have more than ``enough`` tokens that nothing before them changes."""
    begin = len(text) - size
    place = tokenizer.lookahead.resume(text, begin)
    if place is None or tokenizer.count(text[place:]) <= enough:
        return None
    part = tokenizer.shorten(text[begin:])
    origin = np.arange(len(part.text)) if part.origin is None else part.origin
    return Excerpt(part.text, len(text), origin + begin)
