"""Request: one tokenized item in the queue, and the prefix that it has in common with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.engine.schedule.call import Call
from millpond.engine.tokenize.tokenized import Tokenized
from millpond.values.inputs import Item, Pair, TokenIds

# Fewer common tokens are not worth a separate attention call.
_MIN_TOKENS = 16


@dataclass(slots=True, frozen=True, eq=False)
class Prefix:
    """Tokens that a call's requests with this object begin with: a reranker's template up to the document."""

    length: int


@dataclass(slots=True, eq=False)  # one for every text: a frozen one would take five times as long to make
class Request:
    """One distinct item of a call, tokenized; not to be changed."""

    call: Call
    slot: int  # the item's slot in the call
    ids: npt.NDArray[np.int32]  # int32 `[tokens]`
    types: npt.NDArray[np.int8] | None = None  # int8 `[tokens]` token types; `None`: all 0
    attended: int | None = None  # only the first `attended` tokens may be attended to; `None`: all
    kept: npt.NDArray[np.bool_] | None = None  # bool `[tokens]` rows that a per-token result contains; `None`: all
    prefix: Prefix | None = None  # its common prefix; requests with the same prefix may compute it once

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def skip(self) -> int:
        """Leading tokens that pooling leaves out: the call's prompt, which token ids do not get."""
        item = self.call.items[self.slot]
        return item.skip if isinstance(item, TokenIds) else self.call.plan.skip


def shared_prefixes(items: Sequence[Item], tokenized: Sequence[Tokenized]) -> dict[int, Prefix]:
    """The prefix that all pairs of one query begin with, by the index of each item that has one.

    It is read off the token ids: where a template's last words and a document's first ones merge into one token, the
    prefix ends before that token. At least one token of each pair is not part of the prefix.
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
