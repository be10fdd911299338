"""Runner: one forward over one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from millpond.engine.batch import Batch
from millpond.engine.request import Request
from millpond.engine.threads import Threads
from millpond.models.architectures import Architecture
from millpond.pooling.pooler import Matrix, Pooler, Reading


class Runner:
    """A backbone and its pooler on one device."""

    def __init__(
        self, backbone: nn.Module, pooler: Pooler, *, architecture: Architecture, device: torch.device, offset: int
    ) -> None:
        self._backbone = backbone
        self.pooler = pooler
        self._offset = offset
        self.device = device
        self._threads = Threads(backbone, device)
        self._options: dict[str, Any] = {"use_cache": False} if architecture.decoder else {}
        self._token_types = architecture.token_types
        self._adapters = architecture.adapters

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> list[tuple[Request, Matrix]]:
        """Each request with what its call reads: ``[d]``, or ``[tokens, d]`` for a per-token task."""
        with self._threads.using(sum(request.length for request in requests)):
            return self._results(Batch.pack(requests, position_offset=self._offset, device=self.device))

    def _results(self, batch: Batch) -> list[tuple[Request, Matrix]]:
        reading = Reading(
            self.pooler,
            self._forward(batch),
            segments=batch.segments,
            skip=batch.skip,
            input_ids=batch.input_ids[0],
        )
        read = {readout: reading.read(readout) for readout in {request.call.plan.readout for request in batch.requests}}
        results = []
        for i, request in enumerate(batch.requests):
            rows = read[request.call.plan.readout][batch.lead + i]
            results.append((request, rows if request.kept is None else rows[request.kept]))
        return results

    def _forward(self, batch: Batch) -> torch.Tensor:  # [tokens, backbone]
        options = dict(self._options)
        if self._token_types:
            types = batch.token_types
            options["token_type_ids"] = torch.zeros_like(batch.input_ids) if types is None else types
        if self._adapters:
            options["adapter_ids"] = batch.adapter_ids
        out = self._backbone(
            input_ids=batch.input_ids, position_ids=batch.position_ids, segments=batch.segments, **options
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden
