"""Runner: one forward over one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from millpond.attention.segments import Segments
from millpond.checkpoints.architecture import Architecture
from millpond.engine.execute.batch import Batch
from millpond.engine.execute.cuda.buckets import Buckets
from millpond.engine.execute.cuda.graphs import Graphs
from millpond.engine.execute.cuda.pipeline import Pending, Pipeline, Result, results
from millpond.engine.execute.cuda.streams import Backend
from millpond.engine.schedule.request import Request
from millpond.models.int8 import Int8Linear
from millpond.models.linear import ReorderedLinear
from millpond.pooling.pooler import Pooler, Reading, Readout

# Rows that are read alone are filled up to a multiple of this, as tokens are: see ``rounded_up``.
_ROWS = 16


class Runner:
    """A backbone and its pooler on one device.

    On a CPU any thread may run a batch at any time; with a backend one thread does, and may start a batch before it has
    the result of the one before.
    """

    def __init__(
        self,
        backbone: nn.Module,
        pooler: Pooler,
        *,
        architecture: Architecture,
        device: torch.device,
        offset: int,
        backend: Backend | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        """Put a loaded model to work.

        Args:
            backbone: On ``device``, in evaluation mode.
            pooler: Likewise.
            architecture: The backbone's row of the table.
            device: Where both are.
            offset: Position of a text's first token.
            backend: The device's streams; ``None`` runs each batch to its end before the next one.
            buckets: The shapes that graphs are captured for; ``None`` captures none.
        """
        self.backbone = backbone
        self.pooler = pooler
        self._offset = offset
        self.device = device
        self._rounded = device.type == "cpu" and _has_onednn_products(backbone)
        self._options: dict[str, Any] = {"use_cache": False} if architecture.decoder else {}
        self._token_types = architecture.token_types
        self._adapters = architecture.adapters
        self._pipeline: Pipeline | None = None
        if backend is not None:
            graphs = None if buckets is None else Graphs(self, backend, buckets)
            self._pipeline = Pipeline(self, backend, graphs, position_offset=offset)

    @property
    def overlaps(self) -> bool:
        """Whether :meth:`start` comes back before the batch has run."""
        return self._pipeline is not None

    @torch.inference_mode()
    def start(self, requests: Sequence[Request]) -> Pending:
        """Send a batch off, where batches overlap; its results come in the order of the batches.

        Raises:
            Exception: It could not be run, or not even launched; those that are under way are not concerned.
        """
        assert self._pipeline is not None
        return self._pipeline.start(requests)

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Each request with what its call reads: ``[d]``, or ``[tokens, d]`` for a per-token task."""
        if self._pipeline is not None:
            return self._pipeline.start(requests).result()
        batch = Batch.pack(requests, position_offset=self._offset, device=self.device, rounded=self._rounded)
        readouts = {request.call.plan.readout for request in batch.requests}
        reading = self._reading_of_rows(batch, readouts) or self.reading(batch, self.states(batch))
        return results(batch.requests, batch.lead, {readout: reading.read(readout) for readout in readouts})

    def _reading_of_rows(self, batch: Batch, readouts: set[Readout]) -> Reading | None:
        """A reading of one row of each text, where nobody reads more: the last layer is computed for no others."""
        places = {self.pooler.row_of(readout) for readout in readouts}
        if not getattr(self.backbone, "takes_rows", False) or len(places) != 1 or None in places:
            return None
        ends = batch.segments.cu_seqlens
        if places == {"lasttoken"}:
            rows = ends[1:].long() - 1
        elif batch.skip is None:
            rows = ends[:-1].long()
        else:
            return None  # the first token that counts differs between readouts
        if self._rounded and len(rows) > _ROWS:  # the last one again and again, which nobody asks for
            rows = torch.cat((rows, rows[-1:].expand(-len(rows) % _ROWS)))
        return Reading(
            self.pooler,
            self.states(batch, rows=rows),
            segments=Segments.of([1] * len(rows), self.device),
            skip=None,
            input_ids=batch.input_ids[0][rows],
        )

    def states(self, batch: Batch, rows: torch.Tensor | None = None) -> torch.Tensor:  # [tokens, backbone]
        """The backbone's hidden states; with ``rows [n]`` only of these tokens."""
        options = dict(self._options) if rows is None else {**self._options, "rows": rows}
        if self._token_types:
            types = batch.token_types
            options["token_type_ids"] = torch.zeros_like(batch.input_ids) if types is None else types
        if self._adapters:
            options["adapter_ids"] = batch.adapter_ids
        out = self.backbone(
            input_ids=batch.input_ids, position_ids=batch.position_ids, segments=batch.segments, **options
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def reading(self, batch: Batch, states: torch.Tensor) -> Reading:
        """What can be read from a batch's states."""
        return Reading(self.pooler, states, segments=batch.segments, skip=batch.skip, input_ids=batch.input_ids[0])


def _has_onednn_products(backbone: nn.Module) -> bool:
    """Whether its linear layers are oneDNN's, as they are on a CPU in less than float32."""
    return any(
        isinstance(module, ReorderedLinear | Int8Linear)
        or any(weight.dtype is torch.bfloat16 for weight in module.parameters(recurse=False))
        for module in backbone.modules()
    )
