"""Pooler: hidden states to full-width float32 rows, before the final cut and normalization."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from millpond.attention.segments import Segments
from millpond.checkpoints.modules import Dense, Head, Pooling
from millpond.pooling.heads import build_heads
from millpond.pooling.methods import METHODS


class Pooler(nn.Module):
    """The part of a checkpoint behind its backbone.

    The Matryoshka cut and the final normalization are not here: the cache holds what this returns, so that one row
    serves every width.
    """

    def __init__(
        self, pooling: Pooling, *, token_heads: Sequence[Dense], heads: Sequence[Head], device: torch.device
    ) -> None:
        super().__init__()
        self.methods = tuple(METHODS[mode] for mode in pooling.modes)
        self.token_heads = build_heads(token_heads, device)
        self.heads = build_heads(heads, device)

    def tokens(self, hidden: torch.Tensor) -> torch.Tensor:  # [tokens, backbone] -> float32 [tokens, hidden]
        """The rows of ``token_embed``."""
        out: torch.Tensor = self.token_heads(hidden.float())
        return out

    def pool(self, tokens: torch.Tensor, segments: Segments, skip: torch.Tensor | None) -> torch.Tensor:
        """``tokens [tokens, hidden]`` to ``[n, d]``; ``skip [n]`` counts the prompt tokens to leave out."""
        rows = torch.cat([method(tokens, segments, skip) for method in self.methods], dim=-1)
        out: torch.Tensor = self.heads(rows)
        return out
