"""Pipeline: batches launched on a device's streams; the device works while the host packs the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from millpond.backends.backend import Matrix, OutputSpec, PackedBatch, Pending, ReadRows
from millpond.backends.device_errors import is_out_of_memory
from millpond.backends.torch.cuda.graphs import ForwardModel, Graphs
from millpond.backends.torch.cuda.layout import BufferBatch, BufferLayout
from millpond.backends.torch.cuda.streams import Event, Streams
from millpond.backends.torch.pooling.pooler import OutputRows

LateRows = Callable[[], Sequence[Matrix]]  # waits for the device


class Pipeline:
    """A model's batches on one device; used by one thread."""

    def __init__(self, model: ForwardModel, backend: Streams, graphs: Graphs | None) -> None:
        self._model = model
        self._backend = backend
        self._graphs = graphs

    def start(self, packed: PackedBatch, outputs: frozenset[OutputSpec]) -> Pending:
        """Launch a batch after the earlier ones."""
        try:
            with self._backend.computing():
                rows, late = self._rows(packed, outputs)
            hosts, done = self._backend.download([read.values for read in rows.values()])
        except Exception as error:
            if self._graphs is not None and is_out_of_memory(error):
                self._graphs.clear()  # the next attempt may need their memory
            raise
        return _Launched(rows=rows, late=late, hosts=hosts, done=done, backend=self._backend)

    def _rows(
        self, packed: PackedBatch, outputs: frozenset[OutputSpec]
    ) -> tuple[dict[OutputSpec, OutputRows], dict[OutputSpec, LateRows]]:
        """The rows of each output, on the device; a graph computes some or all of them, if there is one.

        The second ones have a size that the device decides: they are read when the batch has run.
        """
        replayed = None if self._graphs is None else self._graphs.run(packed, outputs)
        rows: dict[OutputSpec, OutputRows] = {}
        if replayed is not None:
            rows = {output: OutputRows(values=values, counts=None) for output, values in replayed.rows.items()}
        late: dict[OutputSpec, LateRows] = {}
        remaining = outputs - rows.keys()
        if remaining:
            batch = self._placed(packed)
            states = None if replayed is None else replayed.states
            pooler_call = self._model.call_of_rows(batch, remaining) if states is None else None
            if pooler_call is None:
                pooler_call = self._model.pooler_call(batch, self._model.states(batch) if states is None else states)
            late = {output: pooler_call.launch_sparse() for output in remaining if output.kind == "sparse"}
            rows |= {output: pooler_call.rows(output) for output in remaining - late.keys()}
        return rows, late

    def _placed(self, packed: PackedBatch) -> BufferBatch:
        """Copy a batch to the device, at once."""
        layout = BufferLayout.of(packed)
        host, buffer = self._backend.pinned(layout.size), self._backend.buffer(layout.size)
        layout.fill(host, packed)
        self._backend.upload(host, buffer)
        return layout.batch(buffer, packed)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Launched:
    rows: Mapping[OutputSpec, OutputRows]  # kept until they are downloaded
    late: Mapping[OutputSpec, LateRows]
    hosts: Sequence[torch.Tensor]
    done: Event
    backend: Streams

    def result(self) -> ReadRows:
        self.done.wait()
        read: dict[OutputSpec, Sequence[Matrix]] = {}
        for (output, rows), host in zip(self.rows.items(), self.hosts, strict=True):
            # A call copies rows, but keeps matrices: these must not keep pinned memory alive.
            values = host.numpy() if rows.counts is None else host.numpy().copy()
            read[output] = rows.split(values)
        if self.late:
            with torch.inference_mode(), self.backend.copying():  # the next batch is running meanwhile
                read |= {output: finish() for output, finish in self.late.items()}
        return read
