"""What torch dispatches within a block: on a GPU each of these calls starts a kernel, at least one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    """Counts the calls that compute something, and notes the largest tensor that one of them returns.

    Attributes:
        calls: Number of calls of each operator; views are left out, as they start nothing.
        largest: Bytes of the largest tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest = 0

    @property
    def number(self) -> int:
        """Of all calls."""
        return self.calls.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls[str(func)] += 1
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                # Of what is in memory: a view that repeats rows has none of its own.
                self.largest = max(self.largest, min(tensor.nbytes, tensor.untyped_storage().nbytes()))
        return out
