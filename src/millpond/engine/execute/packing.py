"""Packing: the requests of a batch concatenated into one row of tokens, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from millpond.backends.backend import Ints, OutputSpec, PackedBatch
from millpond.engine.schedule.request import Prefix, Request
from millpond.values.inputs import TokenIds

PrefixOwners = dict[Prefix, tuple[int, np.ndarray]]  # each shared prefix with its index in the row and its ids


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRequests:
    """The requests of a batch, and their tokens."""

    # in the order of the row: by length, so that neighbours of equal length form dense runs
    requests: tuple[Request, ...]
    lead: int  # sequences before theirs: prefixes that several of them share
    batch: PackedBatch

    @property
    def outputs(self) -> frozenset[OutputSpec]:
        """What is read from the batch."""
        return frozenset(request.call.plan.output for request in self.requests)


def pack(requests: Sequence[Request], *, position_offset: int) -> PackedRequests:
    """Pack requests, shortest first; a prefix that several of them share comes first, and only once."""
    owners = _prefix_owners(requests)
    ordered = tuple(sorted(requests, key=partial(_order, owners=owners) if owners else _length))
    skipped = [0] * len(owners) + ([_skipped(request, owners) for request in ordered] if owners else [0] * len(ordered))
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
    skips = _skips(ordered)
    batch = PackedBatch(
        bounds=bounds,
        ids=ids,
        positions=positions,
        types=_types(ordered) if any(request.types is not None for request in ordered) else None,
        adapters=np.repeat(np.array(adapters, dtype=np.int32), lengths) if max(adapters) >= 0 else None,
        skip=np.array(skips, dtype=np.int32) if skips is not None else None,
        keys=keys,
        prefixes=_prefix_owner_of(ordered, owners),
    )
    return PackedRequests(requests=ordered, lead=len(owners), batch=batch)


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


def _skips(requests: Sequence[Request]) -> list[int] | None:
    """The prompt tokens of each request that pooling leaves out; ``None`` if there are none."""
    calls = {id(request.call): request.call for request in requests}
    if not any(call.plan.skip or TokenIds in call.kinds for call in calls.values()):
        return None
    # A text without tokens after its prompt still has one row to pool.
    skips = [min(request.skip, request.length - 1) for request in requests]
    return skips if any(skips) else None


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
