"""RotaryTable: cosines and sines by position, as far as the longest text yet."""

from __future__ import annotations

import threading

import torch

from millpond.models.native import structs

_LEAST = 1024  # positions of the first table


class RotaryTable:
    """The angles of one kind of layers.

    A model may take texts of 131,072 tokens, for which the tables need 64 MB at a head of 128. Few texts are so long,
    so the tables begin short and double.
    """

    def __init__(self, frequencies: torch.Tensor, scaling: float = 1.0) -> None:
        """Angles ``position * frequencies``.

        Args:
            frequencies: float32 ``[dim / 2]``.
            scaling: Factor of cosines and sines.
        """
        self._frequencies = frequencies.detach().float()
        self._scaling = scaling
        self._steps: list[structs.Step] = []
        # Every table that there was: a call that runs in another thread may still read the one before.
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._positions = 0
        self._lock = threading.Lock()

    def attach(self, step: structs.Step) -> None:
        """Let a step rotate by these tables from now on."""
        with self._lock:
            self._steps.append(step)
            if self._tables:
                self._point(step)

    def cover(self, positions: int) -> None:
        """Make sure that the steps find the positions below ``positions``; any number of threads may call it."""
        if positions <= self._positions:
            return
        with self._lock:
            if positions <= self._positions:
                return
            count = max(_LEAST, 1 << (positions - 1).bit_length())
            self._tables.append(self.rows(count))
            # One pointer is set after the other, and both tables have the same numbers for the same positions: a call
            # may read one of the old and one of the new.
            for step in self._steps:
                self._point(step)
            self._positions = count

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the first positions, float32 ``[count, dim / 2]`` each."""
        with torch.inference_mode():
            angles = torch.arange(count, dtype=torch.float32)[:, None] * self._frequencies
            return angles.cos().mul_(self._scaling), angles.sin_().mul_(self._scaling)

    def _point(self, step: structs.Step) -> None:
        cosines, sines = self._tables[-1]
        step.cosines, step.sines = cosines.data_ptr(), sines.data_ptr()
