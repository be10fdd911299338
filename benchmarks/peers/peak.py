"""The measured peak of one core, by instruction set and precision: what a forward pass is compared with."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("peak.cpp")
# Macros of peak.cpp, and the flag of /proc/cpuinfo that each needs.
_MACROS = {
    "HAS_AVX512": "avx512f",
    "HAS_VNNI": "avx512_vnni",
    "HAS_AVX512BF16": "avx512_bf16",
    "HAS_AMX": "amx_bf16",
}


class NoPeakError(Exception):
    """The peak cannot be measured here; the message is one line with the reason."""


def peaks(instruction_sets: Sequence[str], folder: Path) -> dict[str, float]:
    """Gop/s of one core by "instruction set precision"; a multiplication with its addition counts as two.

    Args:
        instruction_sets: Flags of the processor.
        folder: A temporary folder for the program.

    Raises:
        NoPeakError: There is no AVX2, no compiler, or the program fails.
    """
    if not {"avx2", "fma"} <= set(instruction_sets):
        raise NoPeakError("the processor has no AVX2 with FMA")
    named = os.environ.get("CXX")
    compiler = (
        shlex.split(named) if named else [path for name in ("g++", "clang++") if (path := shutil.which(name))][:1]
    )
    if not compiler:
        raise NoPeakError("there is no C++ compiler; install g++ or clang++, or set CXX")
    program = folder / "peak"
    macros = [f"-D{macro}" for macro, flag in _MACROS.items() if flag in instruction_sets]
    build = [*compiler, "-O2", "-std=c++17", *macros, "-o", str(program), str(SOURCE)]
    for command in (build, [str(program)]):
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise NoPeakError(f"{command[0]} ended with {run.returncode}: {run.stderr.strip()[-300:]}")
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in run.stdout.splitlines()}


def peak_of(measured: Mapping[str, float], isa: str, precision: str) -> float | None:
    """The peak of the instruction that kernels of ``isa`` multiply ``precision`` with; None if it was not measured.

    A set without products of a precision of its own uses those of the sets before it.
    """
    order = ("avx2", "avx512", "avx512bf16", "amx")
    for name in reversed(order[: order.index(isa) + 1]):
        if (value := measured.get(f"{name} {precision}")) is not None:
            return value
    return None
