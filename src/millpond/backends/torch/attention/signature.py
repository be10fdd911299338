"""The signature that every packed attention kernel has, and the masking that it applies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from millpond.backends.torch.attention.segments import Segments


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How scores become weights."""

    scale: float  # factor on `q k^T`
    causal: bool  # a token attends to itself and to the tokens before it
    window: int | None = None  # exclusive bound, as transformers passes it: `|i - j| < window`; `None` is no bound
    softcap: float | None = None  # `c tanh(score / c)`; `None` is no cap
    # `[heads, longest, longest]`, added to the scores; a segment uses its upper left corner
    bias: torch.Tensor | None = None

    def mask(self, length: int, device: torch.device, *, keep_causal: bool = False) -> torch.Tensor | None:
        """bool ``[length, length]``, True where a row may attend; ``None`` if no mask is needed.

        ``keep_causal`` writes out a plain causal mask, too, for a kernel without a causal flag.
        """
        window = self.window if self.window is not None and self.window < length else None
        if window is None and not (self.causal and keep_causal):
            return None
        # Two bytes where they suffice: for a long text these matrices are large.
        token = torch.arange(length, device=device, dtype=torch.int16 if length <= 1 << 15 else torch.int32)
        distance = token[:, None] - token[None, :]  # of the row from the key
        allowed = distance >= 0 if self.causal else distance.new_ones((), dtype=torch.bool)
        return allowed if window is None else allowed & (distance.abs() < window)


class KernelError(RuntimeError):
    """A kernel that fits a call cannot serve it in this process; the table goes on to the next kernel that fits.

    Raised before anything has been computed. The kernel no longer fits such calls.
    """


class Kernel(Protocol):
    """A packed attention kernel: a module with these names."""

    NAME: str  # its name in `millpond env` and in the log
    SERVES: str  # the calls it is for, in a few words

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine; ``None`` if it can."""
        ...

    def fits(
        self,
        query: torch.Tensor,  # [tokens, heads, dim]
        key: torch.Tensor,  # [tokens, kv_heads, dim]
        value: torch.Tensor,  # [tokens, kv_heads, dim]
        segments: Segments,
        masking: Masking,
    ) -> bool:
        """Whether it serves this call: all that decides it is checked here, and nothing in ``attend``."""
        ...

    def attend(
        self,
        query: torch.Tensor,  # [tokens, heads, dim]
        key: torch.Tensor,  # [tokens, kv_heads, dim]
        value: torch.Tensor,  # [tokens, kv_heads, dim]
        segments: Segments,
        masking: Masking,
    ) -> torch.Tensor:  # [tokens, heads, dim]
        """Attention within each segment, for a call that fits."""
        ...
