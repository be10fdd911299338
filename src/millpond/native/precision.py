"""The precision in which this processor computes fastest, by measurement.

AVX512-BF16 says that a processor has dot products of bfloat16, not how often it can begin one: AMD's do twice the
operations of float32, those of Intel's Xeons half of them. Their tiles (AMX) do sixteen times as many. ARM's are
measured where they run, too.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, ClassVar

from millpond.native import library

# The instruction sets whose kernels compute in float32 where a higher one has none for it; others are AVX512's.
_FLOAT32 = {"avx2": "avx2", "avxvnni": "avx2", "neon": "neon", "dotprod": "neon", "bf16": "neon"}
# bfloat16 keeps three digits: it has to be faster by that much.
_LEAST_GAIN = 1.25
# A run takes some tens of microseconds. The shortest of several counts: others may use the processor, and it may have
# to raise its clock first. In turn, so that both see the same clock.
_ROUNDS, _RUNS = 4000, 12


class SpeedCall(ctypes.Structure):
    """``struct SpeedCall`` of ``encoder/speed.h``."""

    _fields_: ClassVar = [("rounds", ctypes.c_int64), ("seconds", ctypes.c_double), ("operations", ctypes.c_double)]


@cache
def operations_per_second() -> dict[str, float]:
    """Multiplications and additions that one core begins in a second, by precision; measured once in a process.

    float32 is measured by fused multiply-add, bfloat16 by ``vdpbf16ps`` or ``bfmmla``. A precision that the processor
    lacks is left out, and so are tiles.
    """
    table = library.kernel_table()
    names = ("float32", "bfloat16")
    kernels = {name: kernel for name in names if table is not None and (kernel := getattr(table, f"measure_{name}"))}
    return _fastest(kernels)


def bfloat16_gain() -> float | None:
    """How many times as fast as float32 bfloat16 is without tiles; ``None`` if the kernels do not have both."""
    speeds = operations_per_second()
    return speeds["bfloat16"] / speeds["float32"] if len(speeds) == 2 else None


def bfloat16_is_fast() -> bool | None:
    """Whether the encoder's kernels are faster in bfloat16 than in float32; ``None`` without compiled kernels."""
    if (highest := library.isa()) is None:
        return None
    if highest == "amx":
        return True
    gain = bfloat16_gain()
    return gain is not None and gain >= _LEAST_GAIN


def served_by() -> str:
    """Which kernels serve the encoder on this processor in which precision, and why, for people."""
    table, highest = library.kernel_table(), library.isa()
    if table is None or highest is None:
        return f"none ({library.absent()})"
    float32 = _FLOAT32.get(highest, "avx512")
    pairs, instruction = ("bf16", "bfmmla") if highest == "bf16" else ("avx512bf16", "vdpbf16ps")
    if highest == "amx":
        return f"amx in bfloat16 (tiles), {float32} in float32"
    gain = bfloat16_gain()
    if gain is None:
        return f"{float32} in float32 (no dot products of bfloat16)"
    measured = f"{instruction} does {gain:.1f} x the operations of float32, measured"
    if gain >= _LEAST_GAIN:
        return f"{pairs} in bfloat16 ({measured}), {float32} in float32"
    return f"{float32} in float32 ({measured}: {pairs} only where bfloat16 is asked for)"


def _fastest(kernels: dict[str, Any]) -> dict[str, float]:
    best: dict[str, float] = {}
    for _ in range(_RUNS):
        for name, kernel in kernels.items():
            call = SpeedCall(rounds=_ROUNDS)
            kernel(ctypes.addressof(call))
            if call.seconds > 0:
                best[name] = max(best.get(name, 0.0), call.operations / call.seconds)
    return best
