"""TorchThreads: the number of CPU threads that a batch runs on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from millpond.backends.torch.forwards.int8 import Int8Linear
from millpond.backends.torch.forwards.linear import ReorderedLinear

# Floating-point operations of a batch for which one more thread pays. Every operator of a layer ends in a barrier,
# which costs tens of microseconds when threads have to be woken: on two cores a 6-layer, 384-wide encoder breaks even
# at 200 tokens, 4.2 GFLOP, and one short text takes 2.6 ms on one thread and 6 ms on two.
_FLOPS_PER_THREAD = 4e9
# The same when the threads are awake. OpenMP's threads stay awake for a while between operators as long as there are
# no more of them than cores, as in a program that computes on several threads in its main thread only; reading the
# weights from memory is then what threads share, and even the shortest text gains a third.
_FLOPS_PER_AWAKE_THREAD = 1e8


class TorchThreads:
    """The number of threads that pay for a backbone's batches, and the batches on them."""

    def __init__(self, backbone: nn.Module) -> None:
        self.most = torch.get_num_threads()
        self._per_token = 2.0 * _multiplied_weights(backbone)

    def count(self, tokens: int, *, awake: bool = False) -> int:
        """Threads for a batch of ``tokens``, from 1 to the number that torch had when the engine was made.

        ``awake``: it runs in the main thread, whose OpenMP threads are awake.
        """
        flops = _FLOPS_PER_AWAKE_THREAD if awake else _FLOPS_PER_THREAD
        return min(self.most, 1 + int(tokens * self._per_token / flops))

    def enter(self) -> None:
        """Set torch to one thread; a batch may get more."""
        torch.set_num_threads(1)
        default_threads(self.most)

    @contextmanager
    def running(self, count: int, *, awake: bool) -> Iterator[None]:
        """Context of a batch on ``count`` threads."""
        try:
            with on_threads(count):
                if 1 < count != self.most:
                    default_threads(self.most)
                yield
        finally:
            if count > 1 and not awake:
                default_threads(self.most)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run on ``count`` of torch's threads; the calling thread's number is restored afterwards."""
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
    """Set the number of torch's threads for Python threads that start later, not for the calling one.

    torch keeps a number for each thread, and a new thread gets the number that was set last in any of them: so a thread
    that ends at once sets it.
    """
    setter = threading.Thread(target=torch.set_num_threads, args=(count,), name="millpond-threads")
    setter.start()
    setter.join()


def _multiplied_weights(backbone: nn.Module) -> int:
    """Number of weights that every token is multiplied with: all matrices but the embedding tables.

    A layer that is run several times (ALBERT's) counts as often.
    """
    total = 0
    for _, module in backbone.named_modules(remove_duplicate=False):
        if isinstance(module, ReorderedLinear | Int8Linear):
            total += module.weights
        elif not isinstance(module, nn.Embedding):
            total += sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() == 2)
    return total
