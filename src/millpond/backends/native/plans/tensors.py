"""Tensors: a checkpoint's tensors under today's names; a plan takes each with the shape that config.json says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from millpond.backends.native.packing.weight_packer import Linear
from millpond.checkpoints.head_tensors import parts_unread
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.errors import WeightMismatchError


class Tensors:
    """What a plan takes is checked; :meth:`check` raises what was wrong, and parts of the model that no plan took."""

    def __init__(self, stored: Mapping[str, StoredTensor], name: str, is_head: Callable[[str], bool]) -> None:
        self._stored, self._name, self._is_head = stored, name, is_head
        self._taken: set[str] = set()
        self._missing: set[str] = set()
        self._mismatched: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def take(self, name: str, *shape: int) -> StoredTensor:
        """A tensor of this shape; zeros, which cost nothing, where the file has none."""
        self._taken.add(name)
        tensor = self._stored.get(name)
        if tensor is not None and tensor.shape == shape:
            return tensor
        (self._missing if tensor is None else self._mismatched).add(name)
        return StoredTensor(name=name, dtype="float32", stored=np.broadcast_to(np.float32(0), shape))

    def leave(self, name: str) -> None:
        """A tensor that the file may have, and nothing reads."""
        self._taken.add(name)

    def linear(self, name: str, out: int, into: int, *, biased: bool = True) -> Linear:
        """A linear layer with a weight ``[out, into]``."""
        bias = self.take(f"{name}.bias", out) if biased else None
        return Linear(weight=self.take(f"{name}.weight", out, into), bias=bias)

    def check(self) -> None:
        """Raise WeightMismatchError if the tensors are not those that the plan took."""
        unread = (name for name in self._stored if name not in self._taken and not self._is_head(name))
        unknown = parts_unread(unread, self._taken, self._name)
        problems = (
            ("misses", self._missing),
            ("has a wrong shape for", self._mismatched),
            ("does not know", unknown),
        )
        for problem, names in problems:
            if names:
                raise WeightMismatchError(
                    f"{self._name}: config.json and weights disagree; the model {problem} {min(names)}"
                    + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
                    + "; check that the files belong together"
                )
