"""DeviceBatch: one forward's input on its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from millpond.backends.backend import PackedBatch
from millpond.backends.torch.attention.segments import Segments
from millpond.support.cached_property import cached_property

# A row of at most this many tokens is not rounded: a single short text should not pay for one more sequence.
_UNROUNDED = 64
# A row is rounded up to a multiple of this, or of a sixteenth to a thirty-second of its size, if that is more.
_STEP = 32


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
    """A packed batch, and tensors of it on a device, each made on its first use."""

    packed: PackedBatch  # the arrays on the host
    device: torch.device

    def __init__(self, *, packed: PackedBatch, device: torch.device, **made: Any) -> None:
        """``made``: tensors, by the names of the properties below, in place of those that ``packed`` would give."""
        vars(self).update(packed=packed, device=device, **made)

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


def rounded_up(tokens: int) -> int:
    """The number of tokens that a row of ``tokens`` is filled up to.

    oneDNN compiles a matrix product for every new number of rows, in 0.5 to 4 ms and 0.6 MB each, and caches a thousand
    of them; rounding keeps the numbers few.
    """
    if tokens <= _UNROUNDED:
        return tokens
    step = max(_STEP, 1 << (tokens.bit_length() - 5))
    return -(-tokens // step) * step
