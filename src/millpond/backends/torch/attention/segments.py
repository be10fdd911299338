"""Segments: where each sequence of a packed row begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import eq
from typing import Any, TypeVar

import torch

from millpond.support.cached_property import cached_property

T = TypeVar("T")

# Microseconds that joining a run to a longer neighbour may cost: about what a separate kernel start costs.
_START_COST = 70
# Longer sequences are not joined: copying them into a new layout costs more than a kernel start.
_MAX_JOINED_LENGTH = 160


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring sequences of one length (and one number of keys): a dense batch inside the packed row."""

    start: int  # first token
    count: int
    length: int
    keys: int | None = None  # number of first tokens of each that may be attended to; None: all
    prefix: tuple[int, int] | None = None  # tokens [start, stop) of the row that precede each of them

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.count * self.length


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """Neighbouring runs of nearly equal lengths, to be laid out as one dense batch."""

    runs: tuple[Run, ...]  # the runs; none has limited keys or a prefix
    count: int  # number of sequences
    length: int  # length of the longest one
    rows: torch.Tensor  # int64 `[count * length]`, token index for each row; a shorter sequence repeats its last token
    valid: torch.Tensor  # bool `[count, length]`, False for a repeated token

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Joined:
        """Join ``runs``, of which the last is the longest."""
        length = runs[-1].length
        starts = torch.cat([run.start + run.length * torch.arange(run.count) for run in runs])
        lengths = torch.tensor([run.length for run in runs]).repeat_interleave(torch.tensor([r.count for r in runs]))
        columns = torch.arange(length)
        rows = starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)
        return cls(
            runs=tuple(runs),
            count=len(starts),
            length=length,
            rows=rows.flatten(),
            valid=columns < lengths[:, None],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """The lengths of a packed row's sequences, and the forms of them that kernels need, each made on first use."""

    lengths: tuple[int, ...]  # `n` Python ints, on the host
    device: torch.device | str = "cpu"  # device of the tensors
    # `n` Python ints: how many first tokens of each sequence may be attended to; every token still attends. `None`:
    # all, as for everything but the expansion of a late-interaction query.
    keys: tuple[int, ...] | None = None
    # Of each sequence the index of the one that it continues (a shared prefix), whose keys it attends to too; -1 for
    # none. `None`: no sequence continues another one.
    continued: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        keys: Sequence[int] | None = None,
        prefixes: Sequence[int] | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> Segments:
        """Segments of the given lengths."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a packed row needs sequences of at least one token; got lengths {list(lengths)[:8]}")
        if keys is not None:
            pairs = list(zip(keys, lengths, strict=False))
            if len(keys) != len(lengths) or not all(1 <= usable <= length for usable, length in pairs):
                raise ValueError(
                    f"each sequence attends to at least one and at most all of its tokens; "
                    f"got keys {list(keys)[:8]} for lengths {list(lengths)[:8]}"
                )
            keys = None if all(map(eq, keys, lengths)) else tuple(keys)
        continued = None if prefixes is None else tuple(prefixes)
        segments = cls(lengths=tuple(lengths), device=device, keys=keys, continued=continued)
        if cu_seqlens is not None:
            vars(segments)["cu_seqlens"] = cu_seqlens  # in the place of the tensor that would be made on first use
        return segments

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 ``[n + 1]`` on the device: cumulative lengths from 0."""
        return on_device(torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32), self.device)

    @cached_property
    def seqused_k(self) -> torch.Tensor | None:
        """int32 ``[n]`` on the device: ``keys``, as the packed kernel takes them."""
        if self.keys is None:
            return None
        return on_device(torch.tensor(self.keys, dtype=torch.int32), self.device)

    @cached_property
    def max_seqlen(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Neighbours of equal length, keys and prefix, grouped."""
        return _runs(self.lengths, self.keys, self.continued)

    @property
    def shared(self) -> bool:
        """Whether some sequences continue another one of the row and attend to its keys too."""
        return self.continued is not None

    @cached_property
    def total(self) -> int:
        """Tokens in the row."""
        return sum(self.lengths)

    @cached_property
    def prefixes(self) -> torch.Tensor | None:
        """int32 ``[n, 2]``: first and one past the last token of the sequence that each continues; (0, 0): none."""
        if not self.shared:
            return None
        spans = [run.prefix or (0, 0) for run in self.runs for _ in range(run.count)]
        return torch.tensor(spans, dtype=torch.int32)

    @cached_property
    def parts(self) -> tuple[Run | Joined, ...]:
        """The runs, those of nearly equal length joined: a kernel that goes part by part pays a start for each."""
        parts: list[Run | Joined] = []
        group: list[Run] = []  # the longest first
        for run in reversed(self.runs):
            if group and not _joins(run, group[0]):
                parts.append(_part(group))
                group = []
            group.append(run)
        parts.append(_part(group))
        return tuple(reversed(parts))

    def derive(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returns, made on the first call with ``key``: all layers of a forward share it."""
        if key not in self._derived:
            self._derived[key] = make()
        made: T = self._derived[key]
        return made

    @cached_property
    def _derived(self) -> dict[Hashable, Any]:
        return {}


class Fixed(Segments):
    """Sequences whose lengths are known on the device only: what a captured CUDA graph may read.

    A graph is replayed with other lengths than it was captured with. Reading lengths on the host therefore raises
    :class:`HostLengthsError` instead of returning those of some batch.
    """

    def __init__(self, *, cu_seqlens: torch.Tensor, max_seqlen: int, total: int) -> None:
        """``max_seqlen`` bounds every sequence; ``total`` is the last of ``cu_seqlens``."""
        vars(self).update(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, total=total)

    def __getattr__(self, name: str) -> Any:
        """Called for ``lengths``, which do not exist here, and from which the runs are made."""
        if name != "lengths":
            raise AttributeError(name)
        raise HostLengthsError("the lengths of the sequences are known on the device only")


class HostLengthsError(RuntimeError):
    """A forward read lengths on the host, which a captured graph does not have."""


def on_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the host copied to a device, without waiting for what the device computes.

    A GPU copies from pageable memory only after all earlier work of the stream, and the caller waits for it. From
    pinned memory it copies in the order of the stream, and the caller goes on; the tensor may be dropped at once.
    """
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _part(group: Sequence[Run]) -> Run | Joined:
    """One part of the runs ``group``, which begins with the longest."""
    return group[0] if len(group) == 1 else Joined.of(group[::-1])


def _joins(run: Run, longest: Run) -> bool:
    """Whether laying out a run at the length of a longer neighbour is cheaper than computing it separately.

    Measured at twelve heads of 32: attention over a text of n tokens takes about 0.6 n + 0.008 n^2 microseconds, and a
    separate run 100 more.
    """
    if any(part.keys is not None or part.prefix is not None for part in (run, longest)):
        return False
    short, long = run.length, longest.length
    return (
        short <= long <= _MAX_JOINED_LENGTH
        and run.count * (0.6 * (long - short) + 0.008 * (long**2 - short**2)) < _START_COST
    )


def _runs(lengths: Sequence[int], keys: Sequence[int] | None, prefixes: Sequence[int] | None) -> tuple[Run, ...]:
    if keys is None and prefixes is None:
        return _plain_runs(lengths)
    limits = keys or lengths
    continued = prefixes or [-1] * len(lengths)
    starts = [0, *accumulate(lengths)]
    runs, start = [], 0
    for (length, usable, before), same in groupby(zip(lengths, limits, continued, strict=True)):
        run = Run(
            start=start,
            count=sum(1 for _ in same),
            length=length,
            # A sequence that attends to all of its tokens has no limit, even if its neighbours have one.
            keys=None if usable == length else usable,
            prefix=None if before < 0 else (starts[before], starts[before + 1]),
        )
        runs.append(run)
        start = run.stop
    return tuple(runs)


def _plain_runs(lengths: Sequence[int]) -> tuple[Run, ...]:
    runs, start = [], 0
    for length, same in groupby(lengths):
        run = Run(start=start, count=sum(1 for _ in same), length=length)
        runs.append(run)
        start = run.stop
    return tuple(runs)
