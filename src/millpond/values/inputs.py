"""Inputs: the kinds of items in a call. Each is hashable, so that equal items are computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from millpond.errors import InvalidRequestError


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


def rerank_pairs(query: str, documents: Sequence[str], top_n: int | None) -> list[Pair]:
    """The pairs of a rerank call."""
    if not isinstance(query, str):
        raise TypeError(f"rerank takes one query, a str, not a {type(query).__name__}; score takes several")
    if isinstance(documents, str | bytes | dict) or not isinstance(documents, Iterable):
        raise TypeError(f"rerank takes a list of documents, not a {type(documents).__name__}")
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int | np.integer) or top_n < 1):
        raise InvalidRequestError(f"top_n={top_n!r} must be an int from 1; leave it out for all documents")
    return [Pair(query, document) for document in documents]
