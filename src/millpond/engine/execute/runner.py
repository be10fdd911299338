"""Runner: a batch of requests through a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millpond.backends.backend import Model, Pending
from millpond.engine.execute.packing import PackedRequests, pack
from millpond.engine.execute.results import RequestResult, split_results
from millpond.engine.schedule.request import Request


class PendingBatch(Protocol):
    """A launched batch."""

    def result(self) -> list[RequestResult]:
        """Wait for the batch; each request with its result."""


class Runner:
    """Packs requests for a model on one device, and splits its results."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, requests: Sequence[Request]) -> list[RequestResult]:
        """Run a batch; each request with its result, ``[d]``, or ``[tokens, d]`` for a per-token task."""
        packed = pack(requests, position_offset=self.model.position_offset)
        return split_results(packed, self.model.run(packed.batch, packed.outputs))

    def start(self, requests: Sequence[Request]) -> PendingBatch:
        """Launch a batch without waiting for it, on a device where batches overlap; they end in the order of launch."""
        packed = pack(requests, position_offset=self.model.position_offset)
        return _Launched(packed=packed, pending=self.model.start(packed.batch, packed.outputs))

    def free_memory(self) -> None:
        """Give cached memory of the device back."""
        self.model.free_memory()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Launched:
    packed: PackedRequests
    pending: Pending

    def result(self) -> list[RequestResult]:
        return split_results(self.packed, self.pending.result())
