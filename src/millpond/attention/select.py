"""Which kernel takes a call: one row per kernel, the first that fits."""

from __future__ import annotations

import torch

from millpond.attention import flex, matmul_attention, native, sdpa, varlen
from millpond.attention.signature import Attend, Masking


def select(query: torch.Tensor, masking: Masking) -> Attend:
    """The kernel for ``query [tokens, heads, dim]`` under ``masking``.

    CUDA in half precision runs :mod:`varlen`, with a softcap :mod:`flex`; a CPU in bfloat16 :mod:`native` where it is
    built and :mod:`products` elsewhere; the rest :mod:`sdpa`.
    """
    if native.fits(query, masking):
        return native.attend
    if matmul_attention.fits(query, masking):
        return matmul_attention.attend
    if varlen.fits(query, masking):
        return varlen.attend
    if flex.fits(query, masking):
        return flex.attend
    return sdpa.attend
