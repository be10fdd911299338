"""Kernels: the entries of the kernel table that run a plan in one precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from millpond.native import library

Precision = Literal["float32", "bfloat16"]
# The weights in eight bits: none, those of the feeds, or all.
Int8 = Literal["none", "feeds", "all"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The entries of the kernel table for one precision."""

    dtype: Precision
    pack: Any  # packs rows of a weight
    copy: Any  # copies rows of a table
    encode: Any  # runs a forward pass
    workspace: Any  # bytes of workspace for each thread of a call
    lanes: int  # columns of gate and up that alternate in a gated feed
    isa: str  # the highest instruction set
    pack_int8: Any = None  # packs rows of a weight in eight bits
    int8: Int8 = "none"  # which weights are in eight bits
    tiles: bool = False  # whether they multiply tiles (AMX)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2


def encoder_name(dtype: Precision, int8: Int8) -> str:
    """The name of the native encoder in a precision, as the self-check knows it."""
    kind = {"none": "", "feeds": ", int8", "all": ", int8-all"}[int8]
    return f"encoder in {dtype}{kind}"


def kernels_of(dtype: Precision, highest: str | None = None, *, int8: Int8 = "none") -> Kernels | None:
    """The fastest kernels for a precision on this processor; ``None`` if it has none."""
    table = library.kernel_table(highest)
    if table is None or not getattr(table, f"encode_{dtype}"):
        return None
    isa = str(library.isa(highest))
    return Kernels(
        dtype=dtype,
        pack=getattr(table, f"pack_rows_{dtype}"),
        copy=getattr(table, f"copy_rows_{dtype}"),
        encode=getattr(table, f"encode_{dtype}"),
        workspace=getattr(table, f"encoder_workspace_{dtype}"),
        lanes=library.lanes(isa),
        isa=isa,
        pack_int8=table.pack_rows_int8,
        int8=int8,
        tiles=dtype == "bfloat16" and bool(table.attention_bfloat16),
    )


def missing_kernels(dtype: Precision) -> str | None:
    """Why this processor runs no plan in a precision; ``None`` if it does."""
    if (absent := library.absent()) is not None:
        return f"no compiled kernels: {absent}"
    if kernels_of(dtype) is None:
        return f'this processor has no kernels for {dtype}; dtype="float32" has them'
    return None
