"""The kernels of the encoder for AMX over emulated tile instructions, for processors without them."""

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millpond.native.library import ISAS, KernelTable, isa

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "src/millpond/native"
EMULATION = ROOT / "tests/native/amx_emulation.h"
emulates = [
    pytest.mark.skipif(
        shutil.which("g++") is None or isa() not in ISAS[2:], reason="needs g++ and a processor with AVX512-BF16"
    ),
    pytest.mark.slow,
]


def tile_flags():
    """The compiler flags of the kernels for AMX, and what emulates the tiles."""
    sys.path.insert(0, str(ROOT))
    import hatch_build

    source = NATIVE / "x86_amx/encoder.cpp"
    return [*hatch_build._OPTIONS, *hatch_build.compiler_flags(source), "-include", str(EMULATION)]


def emulated_table(folder, *options):
    """The entries that the encoder's kernels for AMX set in a table; others are empty.

    Compiled once for all files and processes of a run.

    Args:
        folder: A temporary folder of pytest's, for a file or a session.
        options: More of the compiler's.
    """
    pytest.importorskip("hatchling")
    # The folders of a run: a process of several has one of its own in it.
    run = folder.parents[1] if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    library = run / "-".join(["emulated-tiles", *(option.strip("-").replace("=", "-") for option in options)])
    with open(f"{library}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            source = folder / "fill.cpp"
            source.write_text(
                f'#include "{NATIVE}/x86_amx/encoder.cpp"\n#include "{NATIVE}/parallel.cpp"\n'
                f'#include "{NATIVE}/unit_rows.cpp"\n'
                'extern "C" void fill(KernelTable* table) { millpond_add_encoder_amx(table); }\n'
            )
            made = folder / "emulated.so"
            subprocess.run(["g++", *tile_flags(), *options, "-shared", "-o", made, source], check=True)
            made.rename(library)
    table = KernelTable()
    ctypes.CDLL(str(library)).fill(ctypes.byref(table))
    return table
