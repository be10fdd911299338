"""Batch: requests packed into one row, on the host and then on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millpond.attention.segments import Segments
from millpond.engine.schedule.request import Prefix, Request

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """One forward's input on the host.

    Attributes:
        requests: In the order of the row: by length, so that neighbours of equal length form dense runs.
        lead: Sequences in front of theirs: what some of them begin with.
        lengths: ``[n]`` tokens of each sequence.
        ids: ``[tokens]``.
        positions: ``[tokens]``, restarting per sequence.
        types: ``[tokens]`` token types; ``None`` is all 0.
        adapters: ``[tokens]``, -1 for none; ``None`` is none for all.
        skip: ``[n]`` prompt tokens that pooling leaves out; ``None`` where there are none.
        keys: Of each sequence only so many first tokens may be attended to; ``None`` is all of all.
        prefixes: Of each sequence the index of the one that it continues, -1 for none; ``None`` is none for all.
    """

    requests: tuple[Request, ...]
    lead: int
    lengths: Ints
    ids: npt.NDArray[np.int32]
    positions: Ints
    types: Ints | None
    adapters: Ints | None
    skip: Ints | None
    keys: list[int] | None
    prefixes: list[int] | None

    @classmethod
    def of(cls, requests: Sequence[Request], *, position_offset: int) -> Packed:
        """Pack requests, shortest first; what several of them begin with goes into the row once, in front."""
        leads = _leads(requests)
        ordered = tuple(sorted(requests, key=lambda request: _own(request, leads)))
        skipped = [_skipped(request, leads) for request in ordered]
        pieces = [ids for _, ids in leads.values()] + [r.ids[n:] for r, n in zip(ordered, skipped, strict=True)]
        begins = np.array([0] * len(leads) + skipped, dtype=np.int64)
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        ids = np.concatenate(pieces)
        starts = np.cumsum(lengths) - lengths
        keys = None
        if any(request.attended is not None for request in ordered):
            keys = [request.length if request.attended is None else request.attended for request in ordered]
        adapters = np.array([request.call.plan.adapter for request in ordered], dtype=np.int64)
        # A text that tokenizes to nothing of its own behind its prompt still has one row to pool.
        skips = [min(request.skip, request.length - 1) for request in ordered]
        return cls(
            requests=ordered,
            lead=len(leads),
            lengths=lengths,
            ids=ids,
            positions=np.arange(position_offset, position_offset + len(ids)) - np.repeat(starts - begins, lengths),
            types=_types(ordered) if any(request.types is not None for request in ordered) else None,
            adapters=np.repeat(adapters, lengths) if (adapters >= 0).any() else None,
            skip=np.array(skips, dtype=np.int64) if any(skips) else None,
            keys=keys,
            prefixes=_continued(ordered, leads),
        )

    def filled(self, tokens: int, position_offset: int) -> Packed:
        """The same with a last sequence that is nobody's, which fills the row up to ``tokens``."""
        more = tokens - len(self.ids)
        if more == 0:
            return self

        def followed(array: npt.NDArray[Any], value: int, count: int = more) -> npt.NDArray[Any]:
            return np.concatenate((array, np.full(count, value, dtype=array.dtype)))

        return replace(
            self,
            lengths=followed(self.lengths, more, 1),
            ids=followed(self.ids, 0),
            positions=followed(self.positions, position_offset),
            types=None if self.types is None else followed(self.types, 0),
            adapters=None if self.adapters is None else followed(self.adapters, -1),
            skip=None if self.skip is None else followed(self.skip, 0, 1),
            keys=None if self.keys is None else [*self.keys, more],
            prefixes=None if self.prefixes is None else [*self.prefixes, -1],
        )


# Rows of no more tokens are as they are: a short text alone is not to pay for one more sequence.
_UNROUNDED = 64
# A row has a multiple of so many tokens, or of a sixteenth to a thirty-second of its size, if that is more.
_STEP = 32


def rounded_up(tokens: int) -> int:
    """The number of tokens that a row of ``tokens`` is filled up to.

    oneDNN compiles a product anew for every number of rows, for 0.5 to 4 ms and 0.6 MB each, and keeps a thousand of
    them: so there are to be few.
    """
    if tokens <= _UNROUNDED:
        return tokens
    step = max(_STEP, 1 << (tokens.bit_length() - 5))
    return -(-tokens // step) * step


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One forward's input.

    Attributes:
        requests: As :class:`Packed` has them.
        lead: Sequences in front of theirs.
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
    def pack(
        cls, requests: Sequence[Request], *, position_offset: int, device: torch.device, rounded: bool = False
    ) -> Batch:
        """Pack requests as :class:`Packed` does, and put each part on the device.

        Args:
            requests: Whose.
            position_offset: Position of a text's first token.
            device: Where to.
            rounded: Fill the row up to one of few numbers of tokens, see :func:`rounded_up`.
        """
        packed = Packed.of(requests, position_offset=position_offset)
        if rounded:
            packed = packed.filled(rounded_up(len(packed.ids)), position_offset)

        def placed(array: npt.NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            requests=packed.requests,
            lead=packed.lead,
            input_ids=placed(packed.ids.astype(np.int64))[None],
            position_ids=placed(packed.positions)[None],
            segments=Segments.of(packed.lengths.tolist(), device, keys=packed.keys, prefixes=packed.prefixes),
            token_types=None if packed.types is None else placed(packed.types)[None],
            adapter_ids=None if packed.adapters is None else placed(packed.adapters)[None],
            skip=None if packed.skip is None else placed(packed.skip.astype(np.int32)),
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


def _types(requests: Sequence[Request]) -> Ints:
    """int64 ``[tokens]`` token types of the whole row."""
    return np.concatenate(
        [np.zeros(r.length, dtype=np.int64) if r.types is None else r.types.astype(np.int64) for r in requests]
    )
