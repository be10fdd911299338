"""Batch: requests packed into one row of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millpond.attention.segments import Segments
from millpond.engine.request import Request


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One forward's input.

    Attributes:
        requests: In the order of the row: by length, so that neighbours of equal length form dense runs.
        input_ids: int64 ``[1, tokens]``.
        position_ids: int64 ``[1, tokens]``, restarting per sequence.
        segments: Where each sequence lies.
        token_types: int64 ``[1, tokens]``; ``None`` is all 0.
        adapter_ids: int64 ``[1, tokens]``, -1 for none; ``None`` is none for all.
        skip: int32 ``[n]`` prompt tokens that pooling leaves out; ``None`` where there are none.
    """

    requests: tuple[Request, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: Segments
    token_types: torch.Tensor | None
    adapter_ids: torch.Tensor | None
    skip: torch.Tensor | None

    @classmethod
    def pack(cls, requests: Sequence[Request], *, position_offset: int, device: torch.device) -> Batch:
        """Pack requests, shortest first."""
        ordered = tuple(sorted(requests, key=len_of))
        lengths = np.fromiter((request.length for request in ordered), dtype=np.int64, count=len(ordered))
        ids = np.concatenate([request.ids for request in ordered])
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(position_offset, position_offset + len(ids)) - np.repeat(starts, lengths)
        # A text that tokenizes to nothing of its own behind its prompt still has one row to pool.
        keys = None
        if any(request.attended is not None for request in ordered):
            keys = [request.length if request.attended is None else request.attended for request in ordered]
        adapters = np.array([request.call.plan.adapter for request in ordered], dtype=np.int64)
        skips = [min(request.call.skip, request.length - 1) for request in ordered]
        return cls(
            requests=ordered,
            input_ids=_upload(ids.astype(np.int64), device)[None],
            position_ids=_upload(positions, device)[None],
            segments=Segments.of(lengths.tolist(), device, keys=keys),
            token_types=_upload(_types(ordered), device)[None] if any(r.types is not None for r in ordered) else None,
            adapter_ids=_upload(np.repeat(adapters, lengths), device)[None] if (adapters >= 0).any() else None,
            skip=_upload(np.array(skips, dtype=np.int32), device) if any(skips) else None,
        )


def _types(requests: Sequence[Request]) -> np.ndarray:
    """int64 ``[tokens]`` token types of the whole row."""
    return np.concatenate(
        [np.zeros(r.length, dtype=np.int64) if r.types is None else r.types.astype(np.int64) for r in requests]
    )


def len_of(request: Request) -> int:
    """The sort key of a row."""
    return request.length


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A numpy array on the device; through pinned memory and without a sync where that is CUDA."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
