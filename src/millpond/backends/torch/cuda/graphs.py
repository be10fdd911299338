"""CUDA graphs: a forward and its outputs, captured when its shape is seen again, and replayed from then on.

A capture waits for the device and empties torch's caches, so captures must stay few, however many shapes there are. A
model that reads lengths on the host raises HostLengthsError in the first warm-up, and then runs without graphs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch

from millpond.backends.backend import OutputSpec, PackedBatch
from millpond.backends.device_errors import is_device_lost, is_out_of_memory
from millpond.backends.torch.attention.segments import HostLengthsError
from millpond.backends.torch.cuda.buckets import Bucket, Buckets
from millpond.backends.torch.cuda.layout import BufferLayout
from millpond.backends.torch.cuda.streams import Graph, Streams
from millpond.backends.torch.device_batch import ForwardInput
from millpond.backends.torch.pooling.pooler import PoolerCall

logger = logging.getLogger(__name__)

# A capture costs a few forwards: a shape is captured when it is seen for the second time.
_USES = 2
_MOST_GRAPHS = 64
# Of inputs and results, which each graph has memory for; all graphs share one pool for intermediate values.
_MOST_BYTES = 2 << 30
# A batch of more tokens than this keeps a device busy for longer than its launch takes, beside the batch before. Then a
# graph saves less than much padding costs: more than a sixteenth of the rows, and the batch runs without one. (Finer
# shapes would keep the graphs, but twice as many would share the same room; full batches fill their shape anyway.)
_LARGE_TOKENS = 8192
_LARGE_WASTE = 1 / 16
# Shapes without a graph whose uses are counted: the ones used last.
_MOST_SEEN = 1024
# Captures that are made without regard to their time: those of the shapes that a program begins with.
_FREE_CAPTURES = 64
# After them, the part of the running time that captures may take.
_CAPTURE_SHARE = 0.05
# Seconds between two batches that count as running time; more is idleness, which pays for no capture.
_LONGEST_GAP = 1.0
# Shapes whose capture failed, after which no other shape is tried.
_MOST_FAILURES = 4
# Kinds of outputs with a row for each text, computed inside the graph; others are read from its hidden states.
_INSIDE = ("pooled", "logits")


class ForwardModel(Protocol):
    """A backbone and its pooler on one device."""

    def states(self, batch: ForwardInput) -> torch.Tensor:
        """Hidden states ``[tokens, backbone]``."""

    def pooler_call(self, batch: ForwardInput, states: torch.Tensor) -> PoolerCall:
        """Reads a batch's hidden states."""

    def call_of_rows(self, batch: ForwardInput, outputs: Set[OutputSpec]) -> PoolerCall | None:
        """Reads one row of each text, if no output needs more and the backbone can compute only these."""


@dataclass(frozen=True, kw_only=True)
class GraphShape:
    """The key of a graph."""

    layout: BufferLayout  # layout of its input
    longest: int  # most tokens of a sequence
    inside: frozenset[OutputSpec]  # the outputs computed in the graph
    states: bool  # whether its hidden states are read too


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayedRows:
    """The output of a replay, on the device; it may still be running."""

    rows: Mapping[OutputSpec, torch.Tensor]  # `[n, d]` of each output inside the graph
    states: torch.Tensor | None  # `[tokens, backbone]`, if other outputs need them


@dataclass(frozen=True, kw_only=True, eq=False)
class _CapturedGraph:
    graph: Graph
    buffer: torch.Tensor
    rows: Mapping[OutputSpec, torch.Tensor]
    states: torch.Tensor | None

    @property
    def bytes(self) -> int:
        kept = [self.buffer, *self.rows.values(), *([] if self.states is None else [self.states])]
        return sum(tensor.nbytes for tensor in kept)


class Graphs:
    """The graphs of one model on one device; used by one thread."""

    def __init__(
        self,
        model: ForwardModel,
        backend: Streams,
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
        self._captured: OrderedDict[GraphShape, _CapturedGraph] = OrderedDict()  # least recently replayed first
        self._seen: OrderedDict[GraphShape, int] = OrderedDict()  # uses of shapes without a graph; least recent first
        self._failed: set[GraphShape] = set()
        self._short: dict[GraphShape, int] = {}  # captures of a shape that ran out of memory
        self._usable = True
        self._captures = 0  # attempts
        self._capturing = 0.0  # seconds
        self._running = 0.0  # seconds
        self._last = perf_counter()  # when the last batch came

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """The captured shapes, least recently replayed first."""
        return tuple(self._captured)

    def run(self, packed: PackedBatch, outputs: frozenset[OutputSpec]) -> ReplayedRows | None:
        """Replay the graph of a batch, capturing it first if necessary; ``None`` if the batch must run without one.

        Limited keys and shared prefixes have no graph: kernels take them by other arguments.
        """
        if not self._usable or packed.keys is not None or packed.prefixes is not None:
            return None
        bucket = self._buckets.fit(packed.lengths.tolist())
        if bucket is None or _wastes(bucket, len(packed.ids)):
            return None
        inside = frozenset(output for output in outputs if output.kind in _INSIDE)
        layout = BufferLayout.of(packed, bucket)
        shape = GraphShape(layout=layout, longest=bucket.longest, inside=inside, states=inside != outputs)
        captured = self._captured.get(shape)
        self._count_time()
        if captured is None and not self._deserves_graph(shape):
            return None
        host = self._backend.pinned(layout.size)
        layout.fill(host, packed, bucket)
        buffer = self._backend.buffer(layout.size) if captured is None else captured.buffer
        self._backend.upload(host, buffer)
        if captured is None:
            captured = self._capture(shape, bucket, buffer)
            if captured is None:
                return None
        self._captured.move_to_end(shape)
        captured.graph.replay()
        # Copies: the next replay of any graph overwrites the originals, perhaps before they are downloaded.
        return ReplayedRows(
            rows={output: rows[: len(packed.lengths)].clone() for output, rows in captured.rows.items()},
            states=None if captured.states is None else captured.states[: len(packed.ids)].clone(),
        )

    def switch_off(self) -> None:
        """Run every later batch without a graph."""
        self._usable = False
        self.clear()

    def clear(self) -> None:
        """Free the memory of all graphs; shapes are captured again when they are seen again."""
        self._backend.drain()
        self._captured.clear()
        self._backend.forget()

    def _count_time(self) -> None:
        now = perf_counter()
        self._running += min(now - self._last, _LONGEST_GAP)
        self._last = now

    def _deserves_graph(self, shape: GraphShape) -> bool:
        """Whether to capture a shape that is used once more."""
        if shape in self._failed:
            return False
        uses = self._seen[shape] = self._seen.pop(shape, 0) + 1
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        if uses < self._uses << max(0, self._short.get(shape, 0) - 1):
            return False
        return self._captures < _FREE_CAPTURES or self._capturing <= _CAPTURE_SHARE * self._running

    def _capture(self, shape: GraphShape, bucket: Bucket, buffer: torch.Tensor) -> _CapturedGraph | None:
        """Capture a shape; ``None`` if that failed, and the batch runs without a graph."""

        def forward() -> tuple[dict[OutputSpec, torch.Tensor], torch.Tensor | None]:
            batch = shape.layout.static(buffer, bucket)
            pooler_call, states = None if shape.states else self._model.call_of_rows(batch, shape.inside), None
            if pooler_call is None:
                states = self._model.states(batch)
                pooler_call = self._model.pooler_call(batch, states)
            rows = {output: pooler_call.rows(output).values for output in shape.inside}
            return rows, states if shape.states else None

        begun = perf_counter()
        try:
            graph, (rows, states) = self._backend.capture(forward)
        except HostLengthsError as reason:
            logger.info("this model runs without CUDA graphs: %s", reason)
            self._usable = keep = False
        except Exception as error:
            if is_device_lost(error):
                raise
            # If memory is short, perhaps another program has it: the shape is tried again when it has been seen as
            # often again, then twice as often and so on, and what the other graphs have is given back.
            keep = not is_out_of_memory(error)
            if not keep:
                self._short[shape] = self._short.get(shape, 0) + 1
            else:
                self._note_failure(shape, error)
        else:
            return self._keep(shape, _CapturedGraph(graph=graph, buffer=buffer, rows=rows, states=states))
        finally:
            self._seen.pop(shape, None)
            self._captures += 1
            self._capturing += perf_counter() - begun
        # Outside the except block: the traceback would hold the failed forward's tensors alive.
        if keep and self._usable:
            self._backend.forget()
        else:
            self.clear()
        return None

    def _keep(self, shape: GraphShape, captured: _CapturedGraph) -> _CapturedGraph:
        """Keep a graph, and as many of the others as there is room for, the last used ones."""
        self._short.pop(shape, None)
        self._captured[shape] = captured
        while len(self._captured) > 1 and (len(self._captured) > self._most or self._bytes() > self._most_bytes):
            self._captured.popitem(last=False)
        return captured

    def _note_failure(self, shape: GraphShape, error: Exception) -> None:
        """A shape cannot be captured; other shapes are, until several of them failed."""
        self._failed.add(shape)
        if len(self._failed) >= _MOST_FAILURES:
            self._usable = False
            logger.warning(
                "CUDA graphs are given up: %d shapes could not be captured, the last one with %s: %s",
                len(self._failed),
                type(error).__name__,
                error,
            )
            return
        logger.log(
            logging.WARNING if len(self._failed) == 1 else logging.INFO,
            "a batch of %d tokens could not be captured as a CUDA graph; batches of its shape run without one",
            shape.layout.tokens,
            exc_info=error,
        )

    def _bytes(self) -> int:
        return sum(captured.bytes for captured in self._captured.values())


def _wastes(bucket: Bucket, tokens: int) -> bool:
    """Whether a batch of ``tokens`` is faster without padding, and so without a graph."""
    return bucket.tokens > _LARGE_TOKENS and bucket.tokens - tokens > _LARGE_WASTE * bucket.tokens
