"""How many CPU threads a batch is worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from millpond.models.int8 import Int8Linear
from millpond.models.linear import ReorderedLinear

# Floating-point operations of a batch for which one more thread pays. Every operator of a layer ends in a barrier,
# which costs tens of microseconds when threads have to be woken: on two cores a 6-layer, 384-wide encoder breaks even
# at 200 tokens, 4.2 GFLOP, and one short text takes 2.6 ms on one thread and 6 ms on two.
_WORTH = 4e9


class Threads:
    """The share of torch's threads that each batch gets."""

    def __init__(self, backbone: nn.Module, device: torch.device) -> None:
        self._most = torch.get_num_threads() if device.type == "cpu" else 1
        self._per_token = 2.0 * _multiplied_weights(backbone)

    def count(self, tokens: int) -> int:
        """Threads for a batch of ``tokens``, from 1 to as many as torch had when the engine was made."""
        return min(self._most, 1 + int(tokens * self._per_token / _WORTH))

    @contextmanager
    def using(self, tokens: int) -> Iterator[None]:
        """Run a batch on as many threads as it is worth; torch's own number is back in place afterwards."""
        count = self.count(tokens)
        if count == self._most:
            yield
            return
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(self._most)


def _multiplied_weights(backbone: nn.Module) -> int:
    """Weights that every token is multiplied with: all matrices but the embedding tables."""
    total = 0
    for module in backbone.modules():
        if isinstance(module, ReorderedLinear | Int8Linear):
            total += module.weights
        elif not isinstance(module, nn.Embedding):
            total += sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() == 2)
    return total
