"""TorchModel: a backbone and its heads in torch, on one device."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import nn

from millpond.backends.backend import BackendName, OutputSpec, PackedBatch, Pending, ReadRows, Threads
from millpond.backends.torch.attention.segments import Fixed
from millpond.backends.torch.cuda.buckets import Buckets
from millpond.backends.torch.cuda.graphs import Graphs
from millpond.backends.torch.cuda.pipeline import Pipeline
from millpond.backends.torch.cuda.streams import Streams
from millpond.backends.torch.device_batch import DeviceBatch, ForwardInput, rounded_up
from millpond.backends.torch.forwards.int8 import Int8Linear
from millpond.backends.torch.forwards.linear import ReorderedLinear
from millpond.backends.torch.inherited_pool import inherited_pool, outside_inherited_pool
from millpond.backends.torch.pooling.pooler import Pooler, PoolerCall
from millpond.backends.torch.threads import TorchThreads
from millpond.checkpoints.architecture import Architecture

# The number of rows for a last layer that computes only these is rounded up to this; see ``rounded_up``.
_ROW_STEP = 16


class TorchModel:
    """A backbone and its pooler on one device: a :class:`~millpond.backends.backend.Model`.

    On a CPU any thread may run a batch at any time. With streams one thread runs all batches, and may start one
    before it has the results of the one before.
    """

    backend: BackendName = "torch"

    def __init__(
        self,
        backbone: nn.Module,  # on `device`, in evaluation mode
        pooler: Pooler,  # on `device`, in evaluation mode
        *,
        architecture: Architecture,  # the backbone's row in the architecture table
        device: torch.device,  # the device of both
        offset: int,  # position of a text's first token
        streams: Streams | None = None,  # the device's streams; `None`: each batch ends before the next one begins
        buckets: Buckets | None = None,  # the shapes that graphs are captured for; `None`: no graphs
    ) -> None:
        self.backbone = backbone
        self.pooler = pooler
        self.position_offset = offset
        self.placement = device
        self.device = str(device)
        self.threads: Threads | None = TorchThreads(backbone) if device.type == "cpu" else None
        self._rounded = device.type == "cpu" and _has_onednn_products(backbone)
        self._options: dict[str, Any] = {"use_cache": False} if architecture.decoder else {}
        self._token_types = architecture.token_types
        self._adapters = architecture.adapters
        self._pipeline: Pipeline | None = None
        self.streams = streams
        self.graphs: Graphs | None = None
        if streams is not None:
            self.graphs = None if buckets is None else Graphs(self, streams, buckets)
            self._pipeline = Pipeline(self, streams, self.graphs)

    @property
    def overlaps(self) -> bool:
        """Whether :meth:`start` returns before the batch has run."""
        return self._pipeline is not None

    @torch.inference_mode()
    def start(self, batch: PackedBatch, outputs: Set[OutputSpec]) -> Pending:
        """Launch a batch without waiting for it, on a device where batches overlap; they end in the order of launch."""
        assert self._pipeline is not None
        return self._pipeline.start(batch, frozenset(outputs))

    def run(self, batch: PackedBatch, outputs: Set[OutputSpec]) -> ReadRows:
        """The result of each sequence for each output."""
        if self._pipeline is not None:
            return self.start(batch, outputs).result()
        if self._rounded:
            batch = batch.filled(rounded_up(len(batch.ids)), self.position_offset)
        return self._read(DeviceBatch(packed=batch, device=self.placement), outputs)

    def text_vector(self, output: OutputSpec, *, width: int, unit: bool, skip: int) -> None:
        """``None``: every text is run in a batch."""

    def prepare(self, output: OutputSpec) -> None:
        """Read the weights of an output's vocabulary entries now, so that no batch waits for them."""
        if output.kind == "head_rows":
            outside_inherited_pool(lambda: self.pooler.rows_of(output.token_ids, self.placement))

    def leaves_caller(self) -> bool:
        """Whether the calling thread is inside a torch mode, which would change the result, or cannot use OpenMP."""
        # Inside torch.autocast or `with torch.device(...)`; workers never are.
        modes = torch.is_autocast_enabled("cpu") or torch._C._len_torch_function_stack() > 0
        return modes or inherited_pool()

    def free_memory(self) -> None:
        """Give the memory that torch caches back to the device."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _read(self, batch: DeviceBatch, outputs: Set[OutputSpec]) -> ReadRows:
        """The rows of each output, from a forward in torch."""
        pooler_call = self.call_of_rows(batch, outputs) or self.pooler_call(batch, self.states(batch))
        return {output: pooler_call.read(output) for output in outputs}

    def call_of_rows(self, batch: ForwardInput, outputs: Set[OutputSpec]) -> PoolerCall | None:
        """A call for one row per text, if no output needs more: the last layer is computed for these rows only.

        Nothing waits for the device, so a CUDA graph can capture it. ``None`` if more rows are read, or the backbone
        cannot compute some rows only.
        """
        wanted_rows = {self.pooler.row_of(output) for output in outputs}
        if not getattr(self.backbone, "takes_rows", False) or len(wanted_rows) != 1 or None in wanted_rows:
            return None
        ends = batch.segments.cu_seqlens
        if wanted_rows == {"lasttoken"}:
            rows = ends[1:].long() - 1
        elif batch.skip is None:
            # In a graph an empty sequence begins after the last row.
            rows = ends[:-1].long().clamp(max=batch.segments.total - 1)
        else:
            return None  # the first token after the prompt is not the first row
        if self._rounded and len(rows) > _ROW_STEP:  # pad with the last row; the copies are not read
            rows = torch.cat((rows, rows[-1:].expand(-len(rows) % _ROW_STEP)))
        return PoolerCall(
            self.pooler,
            self.states(batch, rows=rows),
            segments=Fixed(
                cu_seqlens=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
                max_seqlen=1,
                total=len(rows),
            ),
            skip=None,
            input_ids=batch.input_ids[0][rows],
        )

    def states(self, batch: ForwardInput, rows: torch.Tensor | None = None) -> torch.Tensor:  # [tokens, backbone]
        """The backbone's hidden states of a batch of requests; with ``rows [n]``, of these tokens only."""
        return self.forward(batch, rows)

    def forward(self, batch: ForwardInput, rows: torch.Tensor | None = None) -> torch.Tensor:  # [tokens, backbone]
        """As :meth:`states`, for any tokens."""
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

    def pooler_call(self, batch: ForwardInput, states: torch.Tensor) -> PoolerCall:
        """Reads a batch's hidden states."""
        return PoolerCall(self.pooler, states, segments=batch.segments, skip=batch.skip, input_ids=batch.input_ids[0])


def _has_onednn_products(backbone: nn.Module) -> bool:
    """Whether linear layers run in oneDNN, as they do on a CPU in less than float32."""
    return any(
        isinstance(module, ReorderedLinear | Int8Linear)
        or any(weight.dtype is torch.bfloat16 for weight in module.parameters(recurse=False))
        for module in backbone.modules()
    )
