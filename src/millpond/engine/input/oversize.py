"""Oversize items: replaced by parts before they are tokenized, a bounded number of characters at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from millpond.engine.tokenize import long_texts
from millpond.engine.tokenize.long_texts import is_oversize
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.tasks import Truncate
from millpond.values.inputs import Item, Pair, SpannedText, TokenIds, size_of, text_of

# Most characters that are tokenized at a time, over any number of items.
_BATCH_CHARACTERS = 1 << 20


def pre_truncate(item: Item, tokenizer: TextTokenizer, *, limit: int, truncate: Truncate) -> Item:
    """``item`` with an oversize text replaced by a part: what truncation keeps of the item stays the same."""
    if isinstance(item, TokenIds):
        return item
    if not isinstance(item, Pair):
        part = tokenizer.long_texts.part(text_of(item), limit=limit, truncate=truncate)
        return replace(item, text=part) if isinstance(item, SpannedText) else part
    query, document = item
    longer, shorter = (query, document) if len(query) > len(document) else (document, query)
    # If both are too long, the one with more tokens may keep one more: then they are counted whole.
    if is_oversize(shorter, limit) or tokenizer.count(shorter) > limit:
        return item
    part = tokenizer.long_texts.part(longer, limit=limit, truncate=truncate)
    return Pair(part, document) if longer is query else Pair(query, part)


def all_small(items: Sequence[Item]) -> bool:
    """Whether no item is oversize, and all of them are tokenized together."""
    return sum(map(size_of, items)) <= min(long_texts._WHOLE_CHARACTERS, _BATCH_CHARACTERS)


def split_by_size(items: Sequence[Item]) -> Iterator[range]:
    """Indices of the items that are tokenized together: few characters in all, and at least one item."""
    first = characters = 0
    for i, item in enumerate(items):
        characters += size_of(item)
        if characters > _BATCH_CHARACTERS and i > first:
            yield range(first, i)
            first, characters = i, size_of(item)
    if first < len(items):
        yield range(first, len(items))
