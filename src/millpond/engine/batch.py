"""Batch: requests packed into one row of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millpond.attention.segments import Segments
from millpond.engine.request import Prefix, Request


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One forward's input.

    Attributes:
        requests: In the order of the row: by length, so that neighbours of equal length form dense runs.
        lead: Sequences in front of theirs: what some of them begin with.
        input_ids: int64 ``[1, tokens]``.
        position_ids: int64 ``[1, tokens]``, restarting per sequence.
        segments: Where each sequence lies.
        token_types: int64 ``[1, tokens]``; ``None`` is all 0.
        adapter_ids: int64 ``[1, tokens]``, -1 for none; ``None`` is none for all.
        skip: int32 ``[n]`` prompt tokens that pooling leaves out; ``None`` where there are none.
    """

    requests: tuple[Request, ...]
    lead: int
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: Segments
    token_types: torch.Tensor | None
    adapter_ids: torch.Tensor | None
    skip: torch.Tensor | None

    @classmethod
    def pack(cls, requests: Sequence[Request], *, position_offset: int, device: torch.device) -> Batch:
        """Pack requests, shortest first; what several of them begin with goes into the row once, in front."""
        leads = _leads(requests)
        ordered = tuple(sorted(requests, key=lambda request: _own(request, leads)))
        skipped = [_skipped(request, leads) for request in ordered]
        pieces = [ids for _, ids in leads.values()] + [r.ids[n:] for r, n in zip(ordered, skipped, strict=True)]
        begins = np.array([0] * len(leads) + skipped, dtype=np.int64)
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        ids = np.concatenate(pieces)
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(position_offset, position_offset + len(ids)) - np.repeat(starts - begins, lengths)
        keys = None
        if any(request.attended is not None for request in ordered):
            keys = [request.length if request.attended is None else request.attended for request in ordered]
        adapters = np.array([request.call.plan.adapter for request in ordered], dtype=np.int64)
        # A text that tokenizes to nothing of its own behind its prompt still has one row to pool.
        skips = [min(request.skip, request.length - 1) for request in ordered]
        return cls(
            requests=ordered,
            lead=len(leads),
            input_ids=_upload(ids.astype(np.int64), device)[None],
            position_ids=_upload(positions, device)[None],
            segments=Segments.of(lengths.tolist(), device, keys=keys, prefixes=_continued(ordered, leads)),
            token_types=_upload(_types(ordered), device)[None] if any(r.types is not None for r in ordered) else None,
            adapter_ids=_upload(np.repeat(adapters, lengths), device)[None] if (adapters >= 0).any() else None,
            skip=_upload(np.array(skips, dtype=np.int32), device) if any(skips) else None,
        )


Leads = dict[Prefix, tuple[int, np.ndarray]]  # each shared prefix with its place in the row and its ids


def _leads(requests: Sequence[Request]) -> Leads:
    """The prefixes that at least two of the requests have.

    They come from causal rerankers alone, whose requests have no token types, adapters, limited keys or prompts.
    """
    seen: dict[Prefix, Request] = {}
    leads: Leads = {}
    for request in requests:
        prefix = request.prefix
        if prefix is None or prefix in leads:
            continue
        if prefix in seen:
            leads[prefix] = (len(leads), request.ids[: prefix.length])
        seen[prefix] = request
    return leads


def _skipped(request: Request, leads: Leads) -> int:
    return request.prefix.length if request.prefix is not None and request.prefix in leads else 0


def _own(request: Request, leads: Leads) -> tuple[int, int]:
    """The sort key of a row: tokens of its own, then what it continues, so that dense runs form."""
    lead = -1 if request.prefix is None or request.prefix not in leads else leads[request.prefix][0]
    return request.length - _skipped(request, leads), lead


def _continued(requests: Sequence[Request], leads: Leads) -> list[int] | None:
    if not leads:
        return None
    return [-1] * len(leads) + [_own(request, leads)[1] for request in requests]


def _types(requests: Sequence[Request]) -> np.ndarray:
    """int64 ``[tokens]`` token types of the whole row."""
    return np.concatenate(
        [np.zeros(r.length, dtype=np.int64) if r.types is None else r.types.astype(np.int64) for r in requests]
    )


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A numpy array on the device; through pinned memory and without a sync where that is CUDA."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
