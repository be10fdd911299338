"""Inputs: the kinds of items in a call. Each is hashable, so that equal items are computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Pair(NamedTuple):
    """A query and a document, read together by a cross-encoder."""

    query: str
    document: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A text that is already tokenized; no special tokens and no prompt are added.

    Attributes:
        ids: The token ids.
        skip: Number of leading ids that are a prompt, which pooling leaves out.
        tail: Number of ids at the end that are never cut: a reward is read there.
    """

    ids: tuple[int, ...]
    skip: int = 0
    tail: int = 0


@dataclass(frozen=True, slots=True)
class SpannedText:
    """A text and character spans ``(start, end)`` in it, each of which gets a vector (late chunking)."""

    text: str
    spans: tuple[tuple[int, int], ...]


Item = str | Pair | TokenIds | SpannedText


def text_of(item: Item) -> str:
    """The text of an item; ``""`` for a pair or token ids."""
    if isinstance(item, str):
        return item
    return item.text if isinstance(item, SpannedText) else ""


def key_of(item: Item) -> str:
    """Key of an item in a cache, unique among items of its kind: the text, or the token ids written out."""
    return f"{item.skip} {item.ids}" if isinstance(item, TokenIds) else text_of(item)


def size_of(item: Item) -> int:
    """Approximate length of an item in characters, to sort items before they are tokenized."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, Pair):
        return len(item.query) + len(item.document)
    return len(item.text) if isinstance(item, SpannedText) else 4 * len(item.ids)
