"""A device that takes time and no processor: its batches end when a clock says so, and their rows are constants.

What the host does is real: scheduling, packing, filling the buffers, choosing a graph, delivering. The device's tensors
are torch's meta tensors, which have shapes only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from millpond.backends.backend import BackendName, OutputSpec, PackedBatch, Pending, ReadRows, Threads
from millpond.backends.torch.cuda.buckets import Buckets
from millpond.backends.torch.cuda.graphs import Graphs
from millpond.backends.torch.cuda.pipeline import Pipeline
from millpond.backends.torch.device_batch import ForwardInput
from millpond.backends.torch.pooling.pooler import OutputRows

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One forward of the device, in seconds of the clock.

    Attributes:
        launched: When the host launched it.
        begin: When the device began: at once, or when the one before had ended.
        end: When it ended.
        tokens: Its tokens, those that fill its shape included.
    """

    launched: float
    begin: float
    end: float
    tokens: int


class Timeline:
    """What the device runs, one forward after the other, and when.

    Args:
        seconds_per_token: Of a forward.
        clock: Seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        seconds_per_token: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds_per_token = seconds_per_token
        self._clock = clock
        self._sleep = sleep
        self.runs: list[Run] = []

    def launch(self, tokens: int) -> Run:
        """Launch a forward; returns before it has begun."""
        now = self._clock()
        begin = max(now, self.runs[-1].end if self.runs else now)
        run = Run(launched=now, begin=begin, end=begin + tokens * self._seconds_per_token, tokens=tokens)
        self.runs.append(run)
        return run

    def wait(self, run: Run) -> None:
        """Wait until a forward has ended."""
        while (left := run.end - self._clock()) > 0:
            self._sleep(left)


class SimulatedBackend:
    """The streams of a simulated device; see :class:`~millpond.backends.torch.cuda.streams.Backend`."""

    def __init__(self, timeline: Timeline, *, width: int) -> None:
        self._timeline = timeline
        self._width = width
        self._capturing = False
        self._captured = 0  # tokens of the forward that is being captured
        self._rows = torch.ones(1, width)  # grows to the most rows of a batch

    def forward(self, tokens: int) -> None:
        """A model's forward: it runs, or is captured."""
        if self._capturing:
            self._captured = tokens
        else:
            self._timeline.launch(tokens)

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32)

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device="meta")

    def upload(self, host: torch.Tensor, buffer: torch.Tensor) -> None:
        buffer.copy_(host, non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], SimulatedEvent]:
        most = max(len(tensor) for tensor in tensors)
        if len(self._rows) < most:
            self._rows = torch.ones(most, self._width)
        return [self._rows[: len(tensor)] for tensor in tensors], SimulatedEvent(self._timeline)

    def capture(self, forward: Callable[[], T]) -> tuple[SimulatedGraph, T]:
        self._capturing = True
        try:
            out = forward()
        finally:
            self._capturing = False
        return SimulatedGraph(self._timeline, self._captured), out

    def forget(self) -> None:
        """Nothing is kept."""

    def drain(self) -> None:
        if self._timeline.runs:
            self._timeline.wait(self._timeline.runs[-1])


class SimulatedEvent:
    """The end of what was launched last."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._run = timeline.runs[-1]

    def wait(self) -> None:
        self._timeline.wait(self._run)


class SimulatedGraph:
    def __init__(self, timeline: Timeline, tokens: int) -> None:
        self._timeline = timeline
        self._tokens = tokens

    def replay(self) -> None:
        self._timeline.launch(self._tokens)


class SimulatedForward:
    """A backbone and its pooler: a number of small operators on the host, and the forward on the device."""

    def __init__(self, backend: SimulatedBackend, *, width: int, operators: int) -> None:
        self._backend = backend
        self._width = width
        self._operators = operators
        self._operand = torch.zeros(1)

    def states(self, batch: ForwardInput) -> torch.Tensor:
        for _ in range(self._operators):  # each lets go of the interpreter's lock, as any operator of torch does
            self._operand.add_(1)
        tokens = batch.input_ids.shape[1]
        self._backend.forward(tokens)
        return torch.empty(tokens, self._width, device="meta")

    def pooler_call(self, batch: ForwardInput, states: torch.Tensor) -> Any:
        return _Reading(torch.empty(batch.segments.cu_seqlens.shape[0] - 1, self._width, device="meta"))

    def call_of_rows(self, batch: ForwardInput, outputs: Any) -> None:
        """It has no layer that could be computed for some rows only."""


class _Reading:
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def rows(self, _: Any) -> OutputRows:
        return OutputRows(values=self._values, counts=None)


class SimulatedModel:
    """A :class:`~millpond.backends.backend.Model` for tasks with a row for each text."""

    backend: BackendName = "torch"
    device = "simulated"
    overlaps = True
    position_offset = 0
    threads: Threads | None = None

    def __init__(self, timeline: Timeline, *, width: int, longest: int, graphs: bool, operators: int) -> None:
        backend = SimulatedBackend(timeline, width=width)
        forward = SimulatedForward(backend, width=width, operators=operators)
        captured = Graphs(forward, backend, Buckets(longest=longest)) if graphs else None
        self._pipeline = Pipeline(forward, backend, captured)

    @torch.inference_mode()
    def start(self, batch: PackedBatch, outputs: Set[OutputSpec]) -> Pending:
        return self._pipeline.start(batch, frozenset(outputs))

    def run(self, batch: PackedBatch, outputs: Set[OutputSpec]) -> ReadRows:
        return self.start(batch, outputs).result()

    def prepare(self, output: OutputSpec) -> None:
        """It has no vocabulary."""

    def leaves_caller(self) -> bool:
        return False

    def free_memory(self) -> None:
        """Nothing is cached."""


class StoredTokenizer:
    """A tokenizer that has tokenized its texts before; it waits as long as other cores would take for them.

    Args:
        backend: The tokenizer.
        texts: All texts that it will be given.
        tokens_per_second: Of the other cores.
    """

    def __init__(self, backend: Any, texts: Sequence[str], *, tokens_per_second: float) -> None:
        self._encodings = dict(zip(texts, backend.encode_batch_fast(list(texts)), strict=True))
        self._tokens_per_second = tokens_per_second

    def encode(self, text: str) -> Any:
        return self._encodings[text]

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        assert add_special_tokens
        encodings = [self._encodings[text] for text in texts]
        time.sleep(sum(map(len, encodings)) / self._tokens_per_second)
        return encodings


def gaps(runs: Sequence[Run]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Seconds that the device had nothing to do before each of its forwards but the first."""
    return np.array([after.begin - before.end for before, after in pairwise(runs)])
