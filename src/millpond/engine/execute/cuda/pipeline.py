"""Pipeline: batches sent down a device's streams without waiting for any of them.

:meth:`Pipeline.start` packs a batch, uploads it, launches its forward and its download, and comes back: the device
works while the host packs the next one. :meth:`Pending.result` waits for that one download and for nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from millpond.engine.execute.batch import Batch, Packed
from millpond.engine.execute.cuda.graphs import Graphs, Model
from millpond.engine.execute.cuda.layout import Layout
from millpond.engine.execute.cuda.streams import Backend, Event
from millpond.engine.schedule.request import Request
from millpond.pooling.pooler import Matrix, Readout, ReadoutRows

Result = tuple[Request, Matrix]


class Pending(Protocol):
    """A batch under way."""

    def result(self) -> list[Result]:
        """Each request with what its call reads, waiting for it.

        Raises:
            Exception: The batch did not run.
        """
        ...


class Pipeline:
    """A model's batches on one device; for one thread."""

    def __init__(self, model: Model, backend: Backend, graphs: Graphs | None, *, position_offset: int) -> None:
        self._model = model
        self._backend = backend
        self._graphs = graphs
        self._offset = position_offset

    def start(self, requests: Sequence[Request]) -> Pending:
        """Launch a batch behind those that are under way.

        Raises:
            Exception: It could not be launched, for want of memory, say.
        """
        packed = Packed.of(requests, position_offset=self._offset)
        readouts = frozenset(request.call.plan.readout for request in packed.requests)
        try:
            with self._backend.computing():
                rows = self._rows(packed, readouts)
            hosts, done = self._backend.download([read.values for read in rows.values()])
        except torch.OutOfMemoryError:
            if self._graphs is not None:
                self._graphs.clear()  # what they hold may be what the next attempt lacks
            raise
        return _Underway(packed=packed, rows=rows, hosts=hosts, done=done)

    def _rows(self, packed: Packed, readouts: frozenset[Readout]) -> dict[Readout, ReadoutRows]:
        """What the batch's calls read, on the device; with a graph, only what the graph does not compute is left."""
        replayed = None if self._graphs is None else self._graphs.run(packed, readouts)
        rows: dict[Readout, ReadoutRows] = {}
        if replayed is not None:
            rows = {readout: ReadoutRows(values=values, counts=None) for readout, values in replayed.rows.items()}
        left = readouts - rows.keys()
        if left:
            batch = self._placed(packed)
            states = self._model.states(batch) if replayed is None or replayed.states is None else replayed.states
            reading = self._model.reading(batch, states)
            rows |= {readout: reading.rows(readout) for readout in left}
        return rows

    def _placed(self, packed: Packed) -> Batch:
        """A batch on the device, in one copy."""
        layout = Layout.of(packed)
        host, block = self._backend.pinned(layout.size), self._backend.block(layout.size)
        layout.fill(host, packed)
        self._backend.upload(host, block)
        return layout.batch(block, packed)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Underway:
    packed: Packed
    rows: Mapping[Readout, ReadoutRows]  # kept until they are downloaded
    hosts: Sequence[torch.Tensor]
    done: Event

    def result(self) -> list[Result]:
        self.done.wait()
        read = {}
        for (readout, rows), host in zip(self.rows.items(), self.hosts, strict=True):
            # A call copies a text's row into its own; matrices it keeps, and they must not keep pinned memory.
            values = host.numpy() if rows.counts is None else host.numpy().copy()
            read[readout] = rows.split(values)
        return results(self.packed.requests, self.packed.lead, read)


def results(requests: Sequence[Request], lead: int, read: Mapping[Readout, Sequence[Matrix]]) -> list[Result]:
    """Each request with its part of what was read for its batch, ``lead`` sequences of which are nobody's."""
    found = []
    for i, request in enumerate(requests):
        rows = read[request.call.plan.readout][lead + i]
        found.append((request, rows if request.kept is None else rows[request.kept]))
    return found
