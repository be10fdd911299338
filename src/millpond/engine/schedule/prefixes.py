"""Prefixes: what the pairs of one query begin with, found in their tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from millpond.engine.input.text_tokenizer import Tokenized
from millpond.engine.schedule.request import Prefix
from millpond.inputs import Item, Pair

# A prefix is worth an attention call of its own from this many tokens on.
_WORTH = 16


def shared_prefixes(items: Sequence[Item], tokenized: Sequence[Tokenized]) -> dict[int, Prefix]:
    """For items by index, the prefix that all pairs of their query begin with.

    It is read off the token ids: where a template's last words and a document's first ones merge into one token, the
    prefix ends before them. At least one token of each pair is left to itself.
    """
    by_query: dict[str, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        if isinstance(item, Pair):
            by_query[item.query].append(i)
    found: dict[int, Prefix] = {}
    for places in by_query.values():
        length = _common([tokenized[i].ids for i in places]) if len(places) > 1 else 0
        if length >= _WORTH:
            prefix = Prefix(length=length)
            found.update(dict.fromkeys(places, prefix))
    return found


def _common(rows: Sequence[np.ndarray]) -> int:
    """How many first ids all of ``rows`` have in common, short of the shortest."""
    most = min(map(len, rows)) - 1
    differs = np.flatnonzero((np.stack([row[:most] for row in rows]) != rows[0][:most]).any(0))
    return int(differs[0]) if len(differs) else most
