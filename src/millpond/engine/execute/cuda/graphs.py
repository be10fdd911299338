"""CUDA graphs: a forward, and what is read from it, launched as one.

A shape that comes back is captured once and replayed from then on: no Python, and none of the hundred launches of a
forward. What cannot be captured finds that out by itself: whoever reads lengths on the host (the kernels that work run
by run, Jamba's mixers, FlexAttention's block masks) raises :class:`~millpond.attention.segments.HostLengthsError` in
the first warm-up, and that model runs as it always did.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from millpond.attention.segments import HostLengthsError
from millpond.engine.execute.batch import Batch, Packed
from millpond.engine.execute.cuda.buckets import Bucket, Buckets
from millpond.engine.execute.cuda.layout import Layout
from millpond.engine.execute.cuda.streams import Backend, Graph
from millpond.pooling.pooler import Reading, Readout

logger = logging.getLogger(__name__)

# A capture costs a few forwards: a shape is captured when it comes for the second time.
_USES = 2
_MOST_GRAPHS = 64
# Of results, which each graph keeps a place for; what is between is shared by all.
_MOST_BYTES = 2 << 30
# Readouts with a row for each text, computed inside the graph; the others are read from its states.
_INSIDE = ("pooled", "logits")


class Model(Protocol):
    """A backbone and what is behind it, on one device."""

    def states(self, batch: Batch) -> torch.Tensor:
        """Hidden states ``[tokens, backbone]``."""
        ...

    def reading(self, batch: Batch, states: torch.Tensor) -> Reading:
        """What can be read from a batch's states."""
        ...


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one graph is captured for.

    Attributes:
        layout: Of its input.
        longest: Most tokens of a sequence.
        inside: The readouts that it computes.
        states: Whether its hidden states are wanted as well.
    """

    layout: Layout
    longest: int
    inside: frozenset[Readout]
    states: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
    """What a replay has on its way.

    Attributes:
        rows: ``[n, d]`` of each readout inside the graph.
        states: ``[tokens, backbone]``, where other readouts need them.
    """

    rows: Mapping[Readout, torch.Tensor]
    states: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Captured:
    graph: Graph
    block: torch.Tensor
    rows: Mapping[Readout, torch.Tensor]
    states: torch.Tensor | None

    @property
    def bytes(self) -> int:
        kept = [self.block, *self.rows.values(), *([] if self.states is None else [self.states])]
        return sum(tensor.nbytes for tensor in kept)


class Graphs:
    """The graphs of one model on one device; for one thread."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        buckets: Buckets,
        *,
        uses: int = _USES,
        most: int = _MOST_GRAPHS,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._model = model
        self._backend = backend
        self._buckets = buckets
        self._uses = uses
        self._most = most
        self._most_bytes = most_bytes
        self._captured: OrderedDict[Shape, _Captured] = OrderedDict()  # least recently replayed first
        self._seen: Counter[Shape] = Counter()
        self._usable = True

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """What is captured, least recently replayed first."""
        return tuple(self._captured)

    def run(self, packed: Packed, readouts: frozenset[Readout]) -> Replayed | None:
        """Replay a batch's graph, captured now if need be; ``None`` where the batch has to run without one.

        Limited keys and shared prefixes have no graph: a kernel gets them by other arguments.
        """
        if not self._usable or packed.keys is not None or packed.prefixes is not None:
            return None
        bucket = self._buckets.fit(packed.lengths.tolist())
        if bucket is None:
            return None
        inside = frozenset(readout for readout in readouts if readout.kind in _INSIDE)
        layout = Layout.of(packed, bucket)
        shape = Shape(layout=layout, longest=bucket.longest, inside=inside, states=inside != readouts)
        self._seen[shape] += 1
        captured = self._captured.get(shape)
        if captured is None and self._seen[shape] < self._uses:
            return None
        host = self._backend.pinned(layout.size)
        layout.fill(host, packed, bucket)
        block = self._backend.block(layout.size) if captured is None else captured.block
        self._backend.upload(host, block)
        if captured is None:
            captured = self._capture(shape, bucket, block)
            if captured is None:
                return None
        self._captured.move_to_end(shape)
        captured.graph.replay()
        # Copies: the next replay, of any graph, writes over the originals, and downloads take their time.
        return Replayed(
            rows={readout: rows[: len(packed.lengths)].clone() for readout, rows in captured.rows.items()},
            states=None if captured.states is None else captured.states[: len(packed.ids)].clone(),
        )

    def clear(self) -> None:
        """Give the memory back; shapes are captured anew."""
        self._backend.drain()
        self._captured.clear()
        self._backend.forget()

    def _capture(self, shape: Shape, bucket: Bucket, block: torch.Tensor) -> _Captured | None:
        """Capture a shape; ``None`` once it turned out that this cannot be done, now and later."""

        def forward() -> tuple[dict[Readout, torch.Tensor], torch.Tensor | None]:
            batch = shape.layout.static(block, bucket)
            states = self._model.states(batch)
            reading = self._model.reading(batch, states)
            rows = {readout: reading.rows(readout).values for readout in shape.inside}
            return rows, states if shape.states else None

        try:
            graph, (rows, states) = self._backend.capture(forward)
        except HostLengthsError as reason:
            self._give_up("this model runs without CUDA graphs: %s", reason)
            return None
        except (MemoryError, torch.OutOfMemoryError):
            # Perhaps for somebody else's memory: it is tried again once this shape has been asked for as often again.
            self.clear()
            self._seen[shape] = 0
            return None
        except Exception as error:  # what runs without a graph must not fail for the lack of one
            logger.warning("a CUDA graph could not be captured; running without graphs", exc_info=error)
            self._give_up("no more CUDA graphs after %s", type(error).__name__)
            return None
        captured = self._captured[shape] = _Captured(graph=graph, block=block, rows=rows, states=states)
        while len(self._captured) > 1 and (len(self._captured) > self._most or self._bytes() > self._most_bytes):
            self._captured.popitem(last=False)
        return captured

    def _bytes(self) -> int:
        return sum(captured.bytes for captured in self._captured.values())

    def _give_up(self, message: str, reason: Any) -> None:
        logger.info(message, reason)
        self._usable = False
        self.clear()
