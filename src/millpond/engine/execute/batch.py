"""DeviceBatch: one forward's input on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from millpond.attention.segments import Segments
from millpond.engine.execute.packing import PackedRequests, rounded_up
from millpond.engine.schedule.request import Request


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceBatch:
    """One forward's input.

    Attributes:
        requests: In the order of the row.
        lead: Sequences before theirs.
        input_ids: int64 ``[1, tokens]``.
        position_ids: int64 ``[1, tokens]``, restarting per sequence.
        segments: Where each sequence begins and ends.
        token_types: int64 ``[1, tokens]``; ``None``: all 0.
        adapter_ids: int64 ``[1, tokens]``, -1 for none; ``None``: no adapters.
        skip: int32 ``[n]`` prompt tokens that pooling leaves out; ``None``: none.
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
    ) -> DeviceBatch:
        """Pack requests as :class:`PackedRequests` does, and put each part on the device.

        Args:
            requests: The requests.
            position_offset: Position of a text's first token.
            device: The device.
            rounded: Whether the row is filled up to one of few numbers of tokens, see :func:`rounded_up`.
        """
        packed = PackedRequests.of(requests, position_offset=position_offset)
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
