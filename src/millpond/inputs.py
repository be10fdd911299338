"""Items: what a call is a list of. Each is hashable, so that equal ones are computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Pair(NamedTuple):
    """A query and a document, read together by a cross-encoder."""

    query: str
    document: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A text that is tokenized already; run as it is, no special tokens and no prompt added.

    Attributes:
        ids: The token ids.
        skip: So many of them, the first, are a prompt that pooling leaves out.
        tail: So many of them, the last, are never cut: a reward is read there.
    """

    ids: tuple[int, ...]
    skip: int = 0
    tail: int = 0


@dataclass(frozen=True, slots=True)
class SpannedText:
    """A text, and the character spans ``(start, end)`` of it that are wanted (late chunking)."""

    text: str
    spans: tuple[tuple[int, int], ...]


Item = str | Pair | TokenIds | SpannedText


def text_of(item: Item) -> str:
    """The text of an item; ``""`` where there is none."""
    if isinstance(item, str):
        return item
    return item.text if isinstance(item, SpannedText) else ""


def key_of(item: Item) -> str:
    """What stands for an item in a cache, among items of its kind: a text itself, or token ids written out."""
    return f"{item.skip} {item.ids}" if isinstance(item, TokenIds) else text_of(item)


def size_of(item: Item) -> int:
    """About how long an item is, in characters: what stretches are sorted by before anything is tokenized."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, Pair):
        return len(item.query) + len(item.document)
    return len(item.text) if isinstance(item, SpannedText) else 4 * len(item.ids)
