"""The one signature that every packed attention kernel has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from millpond.attention.segments import Segments


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How scores become weights.

    Attributes:
        scale: Factor on ``q k^T``.
        causal: A token sees itself and what came before it.
        window: Exclusive bound, as transformers hands it over: ``|i - j| < window``; ``None`` is no bound.
        softcap: ``c tanh(score / c)``; ``None`` is no cap.
        bias: ``[heads, longest, longest]``, added to the scores; a segment takes its upper left corner.
    """

    scale: float
    causal: bool
    window: int | None = None
    softcap: float | None = None
    bias: torch.Tensor | None = None

    def mask(self, length: int, device: torch.device, *, keep_causal: bool = False) -> torch.Tensor | None:
        """bool ``[length, length]``, True where a row may look; ``None`` where the causal flag (or nothing) says it.

        Args:
            length: Tokens of the segment.
            device: Where to build it.
            keep_causal: Write a plain causal mask out as well, for a kernel without a flag.
        """
        window = self.window if self.window is not None and self.window < length else None
        if window is None and not (self.causal and keep_causal):
            return None
        distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
        allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return allowed if window is None else allowed & (distance.abs() < window)


class Attend(Protocol):
    """A packed attention kernel."""

    def __call__(
        self,
        query: torch.Tensor,  # [tokens, heads, dim]
        key: torch.Tensor,  # [tokens, kv_heads, dim]
        value: torch.Tensor,  # [tokens, kv_heads, dim]
        segments: Segments,
        masking: Masking,
    ) -> torch.Tensor:  # [tokens, heads, dim]
        """Attention within each segment."""
        ...
