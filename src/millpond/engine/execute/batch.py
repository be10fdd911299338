"""DeviceBatch: one forward's input on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from millpond.attention.segments import Segments
from millpond.engine.execute.packing import PackedRequests, rounded_up
from millpond.engine.schedule.request import Request
from millpond.support.cached_property import cached_property


class ForwardInput(Protocol):
    """What a forward in torch and its pooling read; see :class:`DeviceBatch`."""

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 ``[1, tokens]``."""

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 ``[1, tokens]``, restarting per sequence."""

    @property
    def segments(self) -> Segments:
        """Where each sequence begins and ends."""

    @property
    def token_types(self) -> torch.Tensor | None:
        """int64 ``[1, tokens]``; ``None``: all 0."""

    @property
    def adapter_ids(self) -> torch.Tensor | None:
        """int64 ``[1, tokens]``, -1 for none; ``None``: no adapters."""

    @property
    def skip(self) -> torch.Tensor | None:
        """int32 ``[n]`` prompt tokens that pooling leaves out; ``None``: none."""


@dataclass(frozen=True, init=False, eq=False)
class DeviceBatch:
    """Packed requests, and tensors of them on a device: made on first use, since a native forward reads none."""

    packed: PackedRequests  # the requests and the arrays on the host
    device: torch.device

    def __init__(self, *, packed: PackedRequests, device: torch.device, **made: Any) -> None:
        """``made``: tensors, by the names of the properties below, in place of those that ``packed`` would give."""
        vars(self).update(packed=packed, device=device, **made)

    @classmethod
    def pack(
        cls, requests: Sequence[Request], *, position_offset: int, device: torch.device, rounded: bool = False
    ) -> DeviceBatch:
        """Pack requests as :class:`PackedRequests` does."""
        packed = PackedRequests.of(requests, position_offset=position_offset)
        if rounded:
            packed = packed.filled(rounded_up(len(packed.ids)), position_offset)
        return cls(packed=packed, device=device)

    @property
    def requests(self) -> tuple[Request, ...]:
        """In the order of the row."""
        return self.packed.requests

    @property
    def lead(self) -> int:
        """Sequences before theirs."""
        return self.packed.lead

    @cached_property
    def input_ids(self) -> torch.Tensor:
        """int64 ``[1, tokens]``."""
        return self._row(self.packed.ids)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """int64 ``[1, tokens]``, restarting per sequence."""
        return self._row(self.packed.positions)

    @cached_property
    def segments(self) -> Segments:
        """Where each sequence begins and ends."""
        packed = self.packed
        return Segments.of(packed.lengths.tolist(), self.device, keys=packed.keys, prefixes=packed.prefixes)

    @cached_property
    def token_types(self) -> torch.Tensor | None:
        """int64 ``[1, tokens]``; ``None``: all 0."""
        return None if self.packed.types is None else self._row(self.packed.types)

    @cached_property
    def adapter_ids(self) -> torch.Tensor | None:
        """int64 ``[1, tokens]``, -1 for none; ``None``: no adapters."""
        return None if self.packed.adapters is None else self._row(self.packed.adapters)

    @cached_property
    def skip(self) -> torch.Tensor | None:
        """int32 ``[n]`` prompt tokens that pooling leaves out; ``None``: none."""
        return None if self.packed.skip is None else torch.from_numpy(self.packed.skip).to(self.device)

    def _row(self, array: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)[None]
