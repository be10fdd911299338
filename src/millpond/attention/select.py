"""Which kernel takes a call: one row per kernel, the first that fits."""

from __future__ import annotations

import torch

from millpond.attention import flex, sdpa, varlen
from millpond.attention.signature import Attend, Masking


def select(query: torch.Tensor, masking: Masking) -> Attend:
    """The kernel for ``query [tokens, heads, dim]`` under ``masking``.

    CPU and CUDA float32 run :mod:`sdpa`, CUDA in half precision :mod:`varlen`, CUDA with a softcap :mod:`flex`.
    """
    if varlen.fits(query, masking):
        return varlen.attend
    if flex.fits(query, masking):
        return flex.attend
    return sdpa.attend
