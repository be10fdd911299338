"""Kernels: the entries of the kernel table that run a plan in one precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from millpond.native import library

# The weights in eight bits: none, those of the feeds, or all.
Int8 = Literal["none", "feeds", "all"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The entries of the kernel table for one precision."""

    pack: Any  # packs a weight
    encode: Any  # runs a forward pass
    workspace: Any  # bytes of workspace for each thread of a call
    lanes: int  # columns of gate and up that alternate in a gated feed
    pack_int8: Any = None  # packs a weight in eight bits
    int8: Int8 = "none"  # which weights are in eight bits
    tiles: bool = False  # whether they multiply tiles (AMX)


def encoder_name(dtype: torch.dtype, int8: Int8) -> str:
    """The name under which ``attention.kernels.disable`` knows the native encoder in a precision."""
    kind = {"none": "", "feeds": ", int8", "all": ", int8-all"}[int8]
    return f"encoder in {str(dtype).removeprefix('torch.')}{kind}"


def kernels_of(dtype: torch.dtype, highest: str | None = None, *, int8: Int8 = "none") -> Kernels | None:
    """The fastest kernels for a precision on this processor; ``None`` if it has none."""
    table = library.kernel_table(highest)
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}.get(dtype)
    if table is None or name is None or not getattr(table, f"encode_{name}"):
        return None
    if int8 != "none" and not table.pack_weight_int8:
        return None
    return Kernels(
        pack=getattr(table, f"pack_weight_{name}"),
        encode=getattr(table, f"encode_{name}"),
        workspace=getattr(table, f"encoder_workspace_{name}"),
        lanes=8 if library.isa(highest) == "avx2" else 16,
        pack_int8=table.pack_weight_int8,
        int8=int8,
        tiles=dtype is torch.bfloat16 and bool(table.attention_bfloat16),
    )
