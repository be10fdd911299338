"""What the engine sees of a model: packed rows go in, float32 rows come out. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from millpond.backends.kernel_check import KernelCheck

Ints = npt.NDArray[np.int32]
Matrix = npt.NDArray[np.float32]
BackendName = Literal["native", "torch"]


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """One kind of result read from the hidden states."""

    # `pooled` (a vector for each text), `tokens` (a vector for each token), `logits`, `token_logits`, `head_rows`
    # (logits of a few vocabulary entries for each token) or `sparse`
    kind: Literal["pooled", "tokens", "logits", "token_logits", "head_rows", "sparse"]
    # The vocabulary entries of `head_rows`; the columns of `token_logits` to keep, empty: all
    token_ids: tuple[int, ...] = ()

    @property
    def per_token(self) -> bool:
        """Whether a text's result has a row for each of its tokens."""
        return self.kind in ("tokens", "token_logits", "head_rows")


# By output, the result of each sequence of a batch: `[d]`, `[tokens, d]`, or for `sparse` `[k, 2]` (token id, weight).
ReadRows = Mapping[OutputSpec, Sequence[Matrix]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """One forward's input: texts concatenated into one row; the arrays are contiguous."""

    bounds: Ints  # `[n + 1]` where each sequence begins in the row, and where the last one ends
    ids: Ints  # `[tokens]`
    positions: Ints  # `[tokens]`, restarting per sequence
    types: Ints | None  # `[tokens]` token types; `None`: all 0
    adapters: Ints | None  # `[tokens]` adapter indices, -1 for none; `None`: no adapters
    skip: Ints | None  # `[n]` prompt tokens that pooling leaves out; `None`: none
    keys: list[int] | None  # number of leading tokens of each sequence that may be attended to; `None`: all
    # of each sequence the index of the one that it continues, -1 for none; `None`: no shared prefixes
    prefixes: list[int] | None

    @property
    def lengths(self) -> Ints:
        """``[n]`` tokens of each sequence."""
        return np.diff(self.bounds)

    def filled(self, tokens: int, position_offset: int) -> PackedBatch:
        """The same row, filled up to ``tokens`` by a last sequence that nobody reads."""
        more = tokens - len(self.ids)
        if more == 0:
            return self

        def extended(array: npt.NDArray[Any], value: int, count: int = more) -> npt.NDArray[Any]:
            return np.concatenate((array, np.full(count, value, dtype=array.dtype)))

        return replace(
            self,
            bounds=extended(self.bounds, tokens, 1),
            ids=extended(self.ids, 0),
            positions=extended(self.positions, position_offset),
            types=None if self.types is None else extended(self.types, 0),
            adapters=None if self.adapters is None else extended(self.adapters, -1),
            skip=None if self.skip is None else extended(self.skip, 0, 1),
            keys=None if self.keys is None else [*self.keys, more],
            prefixes=None if self.prefixes is None else [*self.prefixes, -1],
        )


class Threads(Protocol):
    """The threads of a CPU on which a model runs its batches."""

    most: int  # threads of a batch

    def count(self, tokens: int, *, awake: bool = False) -> int:
        """Threads that pay for a batch of ``tokens``; ``awake``: it runs in the main thread."""

    def enter(self) -> None:
        """Prepare the calling worker thread; called once per thread."""

    @contextmanager
    def running(self, count: int, *, awake: bool) -> Iterator[None]:
        """Context of a batch on ``count`` threads."""


class Pending(Protocol):
    """A batch that was started."""

    def result(self) -> ReadRows:
        """Wait for the batch; its results."""


class TextVector(Protocol):
    """What computes the vector of one text, or of a few short ones, without a batch."""

    most_texts: int
    most_tokens: int  # of all of them
    wake: Callable[[int], None]  # wakes so many threads for a text that is being tokenized

    def __call__(self, ids: Sequence[Ints], threads: int) -> Matrix | None:
        """``[texts, width]``, on so many threads; ``None``: one of them is not finite."""


class Model(Protocol):
    """A checkpoint's weights on one device. On a CPU any thread may run a batch at any time."""

    backend: BackendName  # what computes it
    device: str  # for example "cpu" or "cuda:0"
    position_offset: int  # position of a text's first token
    threads: Threads | None  # `None`: the device runs one batch after another

    @property
    def overlaps(self) -> bool:
        """Whether :meth:`start` returns before the batch has run."""

    def run(self, batch: PackedBatch, outputs: Set[OutputSpec]) -> ReadRows:
        """The result of each sequence for each output."""

    def text_vector(self, output: OutputSpec, *, width: int, unit: bool, skip: int) -> TextVector | None:
        """What computes an output's vector of one text, cut to ``width`` and divided by its length if ``unit``.

        Its first ``skip`` tokens are left out by the pooling. The bits are those of :meth:`run` and of
        :func:`millpond.vectors.matryoshka.cut`. ``None``: there is no shorter way to it than a batch.
        """

    def start(self, batch: PackedBatch, outputs: Set[OutputSpec]) -> Pending:
        """Launch a batch without waiting for it, if the model ``overlaps``; they end in the order of launch."""

    def prepare(self, output: OutputSpec) -> None:
        """Read an output's weights now, so that no batch waits for them."""

    def leaves_caller(self) -> bool:
        """Whether the calling thread is in a state that would change or block a batch, which a worker runs then."""

    def free_memory(self) -> None:
        """Give cached memory of the device back, which may be too scattered for a batch."""


@dataclass(frozen=True, kw_only=True)
class LoadedModels:
    """A checkpoint in memory."""

    models: Sequence[Model]  # one for each device
    dtype: str  # precision of the backbone, by name
    checks: tuple[KernelCheck, ...] = ()  # what the self-check compared
