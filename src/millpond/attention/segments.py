"""Segments: where each sequence of a packed row begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import eq

import torch


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring sequences of one length (and one number of keys): a dense batch inside the packed row."""

    start: int  # first token
    count: int
    length: int
    keys: int | None = None  # only the first so many tokens of each may be attended to; None: all
    prefix: tuple[int, int] | None = None  # tokens [start, stop) of the row that stand before each of them

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.count * self.length


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """The lengths of a packed row's sequences, in the forms the kernels want.

    Attributes:
        lengths: ``n`` Python ints, on the host.
        cu_seqlens: int32 ``[n + 1]`` on the device: cumulative lengths from 0.
        max_seqlen: The longest.
        runs: Neighbours of equal length (and equal keys) grouped together.
        keys: ``n`` Python ints: of each sequence only so many first tokens may be attended to; every token still
            attends. ``None`` where all of them may, as everywhere but in a late-interaction query's expansion.
        shared: Whether some sequences continue another one, the first of the row, whose keys they attend to as well.
        seqused_k: int32 ``[n]`` on the device: ``keys``, as the packed kernel wants them.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    max_seqlen: int
    runs: tuple[Run, ...]
    keys: tuple[int, ...] | None = None
    seqused_k: torch.Tensor | None = None
    shared: bool = False

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        keys: Sequence[int] | None = None,
        prefixes: Sequence[int] | None = None,
    ) -> Segments:
        """Segments of the given lengths.

        Args:
            lengths: Tokens of each.
            device: Where the tensors go.
            keys: Limits how many first tokens of each may be attended to.
            prefixes: Of each the index of the sequence that it continues; -1 for none.

        Raises:
            ValueError: A length below 1 (a sequence of no tokens has no vector), or keys that are none of a sequence's.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a packed row needs sequences of at least one token; got lengths {list(lengths)[:8]}")
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, out=offsets[1:])
        if keys is not None:
            _check_keys(keys, lengths)
            keys = None if all(map(eq, keys, lengths)) else tuple(keys)
        return cls(
            lengths=tuple(lengths),
            cu_seqlens=offsets.to(device, non_blocking=True),
            max_seqlen=max(lengths),
            runs=_runs(lengths, keys, prefixes),
            keys=keys,
            shared=prefixes is not None,
            seqused_k=None if keys is None else torch.tensor(keys, dtype=torch.int32).to(device, non_blocking=True),
        )

    @property
    def total(self) -> int:
        """Tokens in the row."""
        return self.runs[-1].stop


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
            # A sequence that attends to all of itself is an ordinary one, whatever its neighbours are.
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


def _check_keys(keys: Sequence[int], lengths: Sequence[int]) -> None:
    if len(keys) != len(lengths) or not all(
        1 <= usable <= length for usable, length in zip(keys, lengths, strict=True)
    ):
        raise ValueError(
            f"each sequence attends to at least one and at most all of its tokens; "
            f"got keys {list(keys)[:8]} for lengths {list(lengths)[:8]}"
        )
