"""Prefixes: the tokens that all pairs of one query begin with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from millpond.engine.schedule.request import Prefix
from millpond.engine.tokenize.tokenized import Tokenized
from millpond.values.inputs import Item, Pair

# Fewer common tokens are not worth a separate attention call.
_MIN_TOKENS = 16


def shared_prefixes(items: Sequence[Item], tokenized: Sequence[Tokenized]) -> dict[int, Prefix]:
    """Find the prefix that all pairs of one query begin with.

    It is read off the token ids: where a template's last words and a document's first ones merge into one token, the
    prefix ends before that token. At least one token of each pair is not part of the prefix.

    Returns:
        The prefix of each item that has one, by its index in ``items``.
    """
    by_query: dict[str, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        if isinstance(item, Pair):
            by_query[item.query].append(i)
    prefixes: dict[int, Prefix] = {}
    for indices in by_query.values():
        length = _common_tokens([tokenized[i].ids for i in indices]) if len(indices) > 1 else 0
        if length >= _MIN_TOKENS:
            prefixes.update(dict.fromkeys(indices, Prefix(length=length)))
    return prefixes


def _common_tokens(rows: Sequence[np.ndarray]) -> int:
    """Number of leading ids that all ``rows`` have in common, at most one less than the shortest has."""
    most = min(map(len, rows)) - 1
    differs = np.flatnonzero((np.stack([row[:most] for row in rows]) != rows[0][:most]).any(0))
    return int(differs[0]) if len(differs) else most
