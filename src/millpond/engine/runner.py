"""Runner: one forward over one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from millpond.engine.batch import Batch
from millpond.engine.request import Request
from millpond.engine.threads import Threads
from millpond.models.architectures import Architecture
from millpond.pooling.pooler import Pooler

Rows = list[npt.NDArray[np.float32]]


class Runner:
    """A backbone and its pooler on one device."""

    def __init__(
        self, backbone: nn.Module, pooler: Pooler, *, architecture: Architecture, device: torch.device, offset: int
    ) -> None:
        self._backbone = backbone
        self._pooler = pooler
        self._offset = offset
        self.device = device
        self._threads = Threads(backbone, device)
        self._options: dict[str, Any] = {"use_cache": False} if architecture.decoder else {}
        self._token_types = architecture.token_types

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> list[tuple[Request, npt.NDArray[np.float32]]]:
        """Each request with its result: ``[d]`` for ``embed``, ``[tokens, hidden]`` for ``token_embed``."""
        with self._threads.using(sum(request.length for request in requests)):
            return self._results(Batch.pack(requests, position_offset=self._offset, device=self.device))

    def _results(self, batch: Batch) -> list[tuple[Request, npt.NDArray[np.float32]]]:
        tokens = self._pooler.tokens(self._forward(batch))  # float32 [tokens, hidden]
        wanted = {request.call.task for request in batch.requests}
        pooled = _host(self._pooler.pool(tokens, batch.segments, batch.skip)) if "embed" in wanted else None
        matrices = np.split(_host(tokens), np.cumsum(batch.segments.lengths)[:-1]) if "token_embed" in wanted else None
        results: list[tuple[Request, npt.NDArray[np.float32]]] = []
        for i, request in enumerate(batch.requests):
            source = pooled if request.call.task == "embed" else matrices
            assert source is not None
            results.append((request, source[i]))
        return results

    def _forward(self, batch: Batch) -> torch.Tensor:  # [tokens, backbone]
        options = dict(self._options)
        if self._token_types:
            options["token_type_ids"] = torch.zeros_like(batch.input_ids)
        out = self._backbone(
            input_ids=batch.input_ids, position_ids=batch.position_ids, segments=batch.segments, **options
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden


def _host(rows: torch.Tensor) -> npt.NDArray[np.float32]:
    """float32 rows as numpy; the one place that waits for the device."""
    array: npt.NDArray[np.float32] = rows.cpu().numpy()
    return array
