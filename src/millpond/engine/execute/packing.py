"""Packing: the requests of a batch concatenated into one row of tokens, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.engine.schedule.request import Prefix, Request

Ints = npt.NDArray[np.int32]
PrefixOwners = dict[Prefix, tuple[int, np.ndarray]]  # each shared prefix with its index in the row and its ids

# A row of at most this many tokens is not rounded: a single short text should not pay for one more sequence.
_UNROUNDED = 64
# A row is rounded up to a multiple of this, or of a sixteenth to a thirty-second of its size, if that is more.
_STEP = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRequests:
    """One forward's input on the host; the arrays are int32 and contiguous, as native forwards and GPUs take them."""

    # in the order of the row: by length, so that neighbours of equal length form dense runs
    requests: tuple[Request, ...]
    lead: int  # sequences before theirs: prefixes that several of them share
    bounds: Ints  # `[n + 1]` where each sequence begins in the row, and where the last one ends
    ids: Ints  # `[tokens]`
    positions: Ints  # `[tokens]`, restarting per sequence
    types: Ints | None  # `[tokens]` token types; `None`: all 0
    adapters: Ints | None  # `[tokens]` adapter indices, -1 for none; `None`: no adapters
    skip: Ints | None  # `[n]` prompt tokens that pooling leaves out; `None`: none
    keys: list[int] | None  # number of leading tokens of each sequence that may be attended to; `None`: all
    # of each sequence the index of the one that it continues, -1 for none; `None`: no shared prefixes
    prefixes: list[int] | None

    @classmethod
    def of(cls, requests: Sequence[Request], *, position_offset: int) -> PackedRequests:
        """Pack requests, shortest first; a prefix that several of them share comes first, and only once."""
        owners = _prefix_owners(requests)
        ordered = tuple(sorted(requests, key=partial(_order, owners=owners) if owners else _length))
        skipped = [0] * len(owners) + (
            [_skipped(request, owners) for request in ordered] if owners else [0] * len(ordered)
        )
        rows = [ids for _, ids in owners.values()] + [request.ids for request in ordered]
        pieces = [ids[n:] if n else ids for ids, n in zip(rows, skipped, strict=True)]
        lengths = [len(ids) for ids in pieces]
        bounds = np.array([0, *accumulate(lengths)], dtype=np.int32)
        ids = np.concatenate(pieces)
        # [n] what each token's position is less than its index in the row.
        behind = bounds[:-1] - np.array(skipped, dtype=np.int32)
        positions = np.arange(position_offset, position_offset + len(ids), dtype=np.int32)
        if len(pieces) > 1:
            positions -= np.repeat(behind, lengths)
        keys = None
        if any(request.attended is not None for request in ordered):
            keys = [request.length if request.attended is None else request.attended for request in ordered]
        adapters = [request.call.plan.adapter for request in ordered]
        # A text without tokens after its prompt still has one row to pool.
        skips = [min(request.skip, request.length - 1) for request in ordered]
        return cls(
            requests=ordered,
            lead=len(owners),
            bounds=bounds,
            ids=ids,
            positions=positions,
            types=_types(ordered) if any(request.types is not None for request in ordered) else None,
            adapters=np.repeat(np.array(adapters, dtype=np.int32), lengths) if max(adapters) >= 0 else None,
            skip=np.array(skips, dtype=np.int32) if any(skips) else None,
            keys=keys,
            prefixes=_prefix_owner_of(ordered, owners),
        )

    @property
    def lengths(self) -> Ints:
        """``[n]`` tokens of each sequence."""
        return np.diff(self.bounds)

    def filled(self, tokens: int, position_offset: int) -> PackedRequests:
        """The same row, filled up to ``tokens`` by a last sequence that belongs to no request."""
        more = tokens - len(self.ids)
        if more == 0:
            return self

        def extended(array: npt.NDArray[Any], value: int, count: int = more) -> npt.NDArray[Any]:
            return np.concatenate((array, np.full(count, value, dtype=array.dtype)))

        return replace(
            self,
            bounds=extended(self.bounds, tokens, 1),
            ids=extended(self.ids, 0),
            positions=extended(self.positions, position_offset),
            types=None if self.types is None else extended(self.types, 0),
            adapters=None if self.adapters is None else extended(self.adapters, -1),
            skip=None if self.skip is None else extended(self.skip, 0, 1),
            keys=None if self.keys is None else [*self.keys, more],
            prefixes=None if self.prefixes is None else [*self.prefixes, -1],
        )


def rounded_up(tokens: int) -> int:
    """The number of tokens that a row of ``tokens`` is filled up to.

    oneDNN compiles a matrix product for every new number of rows, in 0.5 to 4 ms and 0.6 MB each, and caches a thousand
    of them; rounding keeps the numbers few.
    """
    if tokens <= _UNROUNDED:
        return tokens
    step = max(_STEP, 1 << (tokens.bit_length() - 5))
    return -(-tokens // step) * step


def _prefix_owners(requests: Sequence[Request]) -> PrefixOwners:
    """The prefixes that at least two of the requests share.

    Only causal rerankers have them, whose requests have no token types, adapters, limited keys or prompts.
    """
    seen: dict[Prefix, Request] = {}
    owners: PrefixOwners = {}
    for request in requests:
        prefix = request.prefix
        if prefix is None or prefix in owners:
            continue
        if prefix in seen:
            owners[prefix] = (len(owners), request.ids[: prefix.length])
        seen[prefix] = request
    return owners


def _length(request: Request) -> int:
    return len(request.ids)


def _skipped(request: Request, owners: PrefixOwners) -> int:
    """Tokens of a request that are in a lead sequence."""
    return request.prefix.length if request.prefix is not None and request.prefix in owners else 0


def _order(request: Request, owners: PrefixOwners) -> tuple[int, int]:
    """Sort key in the row: tokens outside the prefix, then the lead that it continues, so that dense runs form."""
    lead = -1 if request.prefix is None or request.prefix not in owners else owners[request.prefix][0]
    return request.length - _skipped(request, owners), lead


def _prefix_owner_of(requests: Sequence[Request], owners: PrefixOwners) -> list[int] | None:
    if not owners:
        return None
    return [-1] * len(owners) + [_order(request, owners)[1] for request in requests]


def _types(requests: Sequence[Request]) -> Ints:
    """``[tokens]`` token types of the whole row."""
    return np.concatenate(
        [np.zeros(r.length, dtype=np.int64) if r.types is None else r.types.astype(np.int64) for r in requests]
    ).astype(np.int32)
