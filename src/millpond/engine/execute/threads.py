"""How many of torch's CPU threads a batch runs on."""

from __future__ import annotations

import threading
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
# The same where the threads are at hand. OpenMP's threads stay awake for a while between operators as long as there
# are no more of them than cores, as in a program whose main thread alone computes on several; then it is the weights'
# way from memory that threads share, and the shortest of texts gains a third.
_WORTH_AT_HAND = 1e8


class Threads:
    """How many threads a backbone's batches are worth."""

    def __init__(self, backbone: nn.Module) -> None:
        self.most = torch.get_num_threads()
        self._per_token = 2.0 * _multiplied_weights(backbone)

    def count(self, tokens: int, *, at_hand: bool = False) -> int:
        """Threads for a batch of ``tokens``, from 1 to as many as torch had when the engine was made.

        ``at_hand``: it runs in the main thread, whose OpenMP threads are awake.
        """
        return min(self.most, 1 + int(tokens * self._per_token / (_WORTH_AT_HAND if at_hand else _WORTH)))


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run on ``count`` of torch's threads; this thread's own number is back in place afterwards."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def default_threads(count: int) -> None:
    """Leave ``count`` threads to threads that start later, without changing the calling one's.

    torch keeps a number for each thread, and hands the last one that any of them was given to those that come later:
    so it is put right by a thread that is gone at once.
    """
    setter = threading.Thread(target=torch.set_num_threads, args=(count,), name="millpond-threads")
    setter.start()
    setter.join()


def _multiplied_weights(backbone: nn.Module) -> int:
    """Weights that every token is multiplied with: all matrices but the embedding tables.

    A layer that is passed several times (ALBERT's) counts as often.
    """
    total = 0
    for _, module in backbone.named_modules(remove_duplicate=False):
        if isinstance(module, ReorderedLinear | Int8Linear):
            total += module.weights
        elif not isinstance(module, nn.Embedding):
            total += sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() == 2)
    return total
