"""Rotation: cosines and sines of rotary positions, in tables that grow with the longest text."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from millpond.backends.torch.native import structs
from millpond.backends.torch.native.weight_packer import NotSupported

# Positions that a table has at first. A model may have a million, and most texts are short.
_FIRST = 512


class Rotation:
    """The tables of one base of a rotary module of transformers, float32 ``[positions, dim / 2]``.

    A larger pair of tables replaces a smaller one. The smaller one stays in memory for the calls that read it, so all
    tables together have less than twice the size of the largest.
    """

    def __init__(self, rotary: nn.Module, *kind: str) -> None:
        types: Any = getattr(rotary, "rope_type", "default")
        name = types.get(*kind) if isinstance(types, dict) else types
        if not isinstance(name, str) or "dynamic" in name or name == "longrope":
            raise NotSupported(f"rotary positions of type {name}")
        self._rotary: Any = rotary
        self._kind = kind
        self._steps: list[structs.Step] = []
        self._tables: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self.positions = 0
        self.cover(_FIRST)

    def serve(self, step: structs.Step) -> None:
        """Let a step read the tables, now and when they have grown."""
        with self._lock:
            self._steps.append(step)
            step.cosines, step.sines = (table.data_ptr() for table in self._tables[-2:])

    def cover(self, positions: int) -> None:
        """Let the tables have at least so many positions; any thread may call it, during forward passes too."""
        if positions <= self.positions:
            return
        with self._lock:
            if positions <= self.positions:
                return
            count = max(positions, 2 * self.positions)
            places, float32 = torch.arange(count)[None], torch.empty(0)
            tables = [part[0].chunk(2, -1)[0].contiguous() for part in self._rotary(float32, places, *self._kind)]
            self._tables += tables
            for step in self._steps:
                step.cosines, step.sines = (table.data_ptr() for table in tables)
            self.positions = count
