"""Segments: where each sequence of a packed row begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring sequences of one length: a dense batch inside the packed row."""

    start: int  # first token
    count: int
    length: int

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
        runs: Neighbours of equal length grouped together.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    max_seqlen: int
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Segments:
        """Segments of the given lengths.

        Raises:
            ValueError: A length below 1; a sequence of no tokens has no vector.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a packed row needs sequences of at least one token; got lengths {list(lengths)[:8]}")
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, out=offsets[1:])
        runs, start = [], 0
        for length, same in groupby(lengths):
            run = Run(start=start, count=sum(1 for _ in same), length=length)
            runs.append(run)
            start = run.stop
        return cls(
            lengths=tuple(lengths),
            cu_seqlens=offsets.to(device, non_blocking=True),
            max_seqlen=max(lengths),
            runs=tuple(runs),
        )

    @property
    def total(self) -> int:
        """Tokens in the row."""
        return self.runs[-1].stop
