"""Flow: what passes from step to step of a plan in torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from millpond.backends.torch.attention.segments import Segments


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The rows of one part of every text."""

    rows: torch.Tensor  # int64 `[tokens of the part]`: their index in the packed row
    lengths: tuple[int, ...]  # tokens of each text, 0 where it has none


@dataclass(kw_only=True)
class Flow:
    """What passes from step to step: the buffers of ``native/encoder/plan.h``, and a call's arguments."""

    ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    types: torch.Tensor | None  # [tokens]
    segments: Segments
    states: torch.Tensor  # [tokens, columns]
    sums: torch.Tensor  # [tokens, columns]
    branch: torch.Tensor  # [tokens, columns]
    heads: torch.Tensor  # [tokens, columns]: queries, keys and values, then the attention's result
    kept: torch.Tensor  # [tokens, columns], an encoder's states
    # Where an encoder reads one part of a text and a decoder the other: ids, types and segments of both, their parts,
    # keys and values of the kept states, and how many these are of each text
    text: tuple[torch.Tensor, torch.Tensor | None, Segments]
    parts: tuple[Part, ...] = ()
    kept_heads: torch.Tensor | None = None
    kept_counts: tuple[int, ...] = ()
    made: dict[Any, Any] = field(default_factory=dict)  # what layers share, by the module that makes it

    def put(self, result: torch.Tensor, target: str) -> None:
        """``result`` as the sums, added to them ("add"), or as the branch."""
        if target == "branch":
            self.branch = result
        else:
            self.sums = self.sums + result if target == "add" else result

    def keep(self, rows: torch.Tensor) -> None:
        """Leave the other rows out from now on; of parts, those of the last one can be kept."""
        if self.parts:
            places = torch.zeros_like(self.text[0])
            rows = places.index_copy_(0, self.parts[1].rows, torch.arange(len(self.ids), device=rows.device))[rows]
        self.states, self.sums, self.heads = self.states[rows], self.sums[rows], self.heads[rows]
        self.branch = self.branch[rows] if len(self.branch) else self.branch
