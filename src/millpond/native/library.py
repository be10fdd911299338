"""The library of the compiled kernels, loaded with ctypes: it links to no Python, so one build serves all versions.

It is built from the sources in this folder when the package is built or installed, if there is a C++ compiler. It has
two sets of kernels:

- :func:`library`: those of the torch backend (attention, norms, rotary positions), for processors with AVX512-BF16.
- :func:`kernel_table`: those of the native encoder and of late interaction, for x86-64 from AVX2 on and for ARM. Each
  instruction set of :data:`ISAS` has a folder of its own, and the table has the fastest function of each kernel that
  this processor can run.

``MILLPOND_NATIVE=0`` switches both off. ``MILLPOND_ISA`` names the highest instruction set to use, for example
``avx2``: one that the processor does not have changes nothing. ``MILLPOND_PIN=1`` keeps each of the kernels' threads on
a core. All are read when the library is loaded, once in a process.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("libmillpond.so")
_SWITCH, _HIGHEST, _PIN = "MILLPOND_NATIVE", "MILLPOND_ISA", "MILLPOND_PIN"
_int, _float, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


# The macro by which compilers say for which processors they compile: what the folders' names of those begin with.
FAMILIES = {"__x86_64__": "x86", "__aarch64__": "arm"}
_MACHINES = {"x86_64": "x86", "AMD64": "x86", "aarch64": "arm", "arm64": "arm"}


class InstructionSet(NamedTuple):
    """A row of isas.h.

    Attributes:
        name: Of ``MILLPOND_ISA``.
        folder: Of its sources.
        flags: The compiler's.
        instruction: One that a compiler must know.
    """

    name: str
    folder: str
    flags: tuple[str, ...]
    instruction: str

    @property
    def lanes(self) -> int:
        """Numbers of float32 in a vector of its kernels (lanes.h)."""
        return 16 if "-mavx512f" in self.flags else 8


def instruction_sets(family: str | None) -> tuple[InstructionSet, ...]:
    """The rows of isas.h for a family of processors, in ascending order."""
    text = LIBRARY.with_name("isas.h").read_text(encoding="utf-8")
    parts = re.split(r"^#(?:el)?if defined\((\w+)\)$", text, flags=re.MULTILINE)[1:]
    body = next((rows for macro, rows in zip(parts[::2], parts[1::2], strict=True) if FAMILIES[macro] == family), "")
    flags: dict[str, tuple[str, ...]] = {"none": ()}
    sets = []
    for name, base, own, probe in re.findall(r'ISA\((\w+), (\w+), "([^"]*)", "([^"]+)",', body):
        flags[name] = (*flags[base], *own.split())
        sets.append(InstructionSet(name, f"{family}_{name}", flags[name], probe))
    return tuple(sets)


# Of this machine, in ascending order: kernels of a later one replace those of the sets before it.
INSTRUCTION_SETS = instruction_sets(_MACHINES.get(platform.machine()))
ISAS = tuple(row.name for row in INSTRUCTION_SETS)


class KernelTable(ctypes.Structure):
    """``struct KernelTable`` of kernel_table.h: functions of one argument, the address of a struct of the call.

    They run without the GIL, and return 0, or -1 if there was no memory. An entry is false if this processor, or the
    compiler that built the library, does not have it.
    """

    _fields_ = [
        (name, ctypes.CFUNCTYPE(_int, _pointer))
        for name in (
            *("pack_int8", "pack_bfloat16", "maxsim_int8", "maxsim_bfloat16", "maxsim_float32"),
            *("nearest_centroids", "centroid_similarities", "similarity_table", "scan_codes", "best_documents"),
            *("score_residuals", "encode_residuals"),
            *("measure_float32", "measure_bfloat16"),
            *("encode_float32", "encoder_workspace_float32", "encode_bfloat16", "encoder_workspace_bfloat16"),
            *("attention_bfloat16", "attention_workspace_bfloat16"),
            *("pack_rows_float32", "pack_rows_bfloat16", "pack_rows_int8"),
            *("copy_rows_float32", "copy_rows_bfloat16"),
            *("head_product", "gelu", "vocabulary_float32", "vocabulary_bfloat16"),
        )
    ]
    pack_int8: Any
    pack_bfloat16: Any
    maxsim_int8: Any
    maxsim_bfloat16: Any
    maxsim_float32: Any
    nearest_centroids: Any
    centroid_similarities: Any
    similarity_table: Any
    scan_codes: Any
    best_documents: Any
    score_residuals: Any
    encode_residuals: Any
    measure_float32: Any
    measure_bfloat16: Any
    encode_float32: Any
    encoder_workspace_float32: Any
    encode_bfloat16: Any
    encoder_workspace_bfloat16: Any
    attention_bfloat16: Any
    attention_workspace_bfloat16: Any
    pack_rows_float32: Any
    pack_rows_bfloat16: Any
    pack_rows_int8: Any
    copy_rows_float32: Any
    copy_rows_bfloat16: Any
    head_product: Any
    gelu: Any
    vocabulary_float32: Any
    vocabulary_bfloat16: Any


@cache
def source_hash() -> int:
    """A hash of the sources in this folder and below; the build writes it into the library."""
    digest = hashlib.sha256()
    folder = LIBRARY.parent
    for path in sorted(path for kind in ("*.cpp", "*.h") for path in folder.rglob(kind)):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return int.from_bytes(digest.digest()[:8], "big")


@cache
def library() -> ctypes.CDLL | None:
    """The encoder's kernels; ``None`` if they were not built, are switched off, or this processor cannot run them.

    A build that is broken, or of other sources, is not used either, and logged as a warning.
    """
    return None if isinstance(loaded := _encoder(), str) else loaded


def portable() -> ctypes.CDLL | None:
    """The functions that every processor runs; ``None`` if the library was not built or is switched off."""
    return None if isinstance(loaded := _load(), str) else loaded


def unavailable() -> str | None:
    """The reason why :func:`library` returns ``None``; ``None`` if it returns the kernels."""
    return loaded if isinstance(loaded := _encoder(), str) else None


@cache
def kernel_table(highest: str | None = None) -> KernelTable | None:
    """The kernels of this processor; ``None`` as for :func:`library`, or if it is of x86-64 and has no AVX2.

    Args:
        highest: An instruction set of :data:`ISAS`; those above it are not used. ``None``: that of ``MILLPOND_ISA``.
    """
    return None if isinstance(filled := _fill(highest), str) else filled[0]


def isa(highest: str | None = None) -> str | None:
    """The highest instruction set of :func:`kernel_table`, as it is named in :data:`ISAS`; ``None`` without a table."""
    return None if isinstance(filled := _fill(highest), str) else filled[1]


def lanes(isa: str) -> int:
    """Numbers of float32 in a vector of an instruction set's kernels."""
    return INSTRUCTION_SETS[ISAS.index(isa)].lanes


def absent() -> str | None:
    """The reason why :func:`kernel_table` returns ``None``; ``None`` if it returns a table."""
    return filled if isinstance(filled := _fill(None), str) else None


@cache
def _fill(highest: str | None) -> tuple[KernelTable, str] | str:
    """The table and its highest instruction set, or the reason why there is none."""
    loaded = _load()
    if isinstance(loaded, str):
        return loaded
    table = KernelTable()
    level = loaded.millpond_kernel_table(ctypes.byref(table), ISAS.index(highest) + 1 if highest else _limit())
    return (table, ISAS[level - 1]) if level else "this processor has no AVX2"


def _limit() -> int:
    """The highest instruction set that ``MILLPOND_ISA`` allows, counted from 1."""
    name = os.environ.get(_HIGHEST, "").strip().lower()
    if name and name not in ISAS:
        logger.warning("%s=%s is no instruction set and ignored; it may be %s", _HIGHEST, name, ", ".join(ISAS))
    return ISAS.index(name) + 1 if name in ISAS else len(ISAS)


def _encoder() -> ctypes.CDLL | str:
    """The encoder's kernels, or the reason why they are not available."""
    loaded = _load()
    if isinstance(loaded, str):
        return loaded
    if not loaded.millpond_supported():
        return "this processor has no AVX512-BF16"
    if _limit() <= ISAS.index("avx512bf16"):
        return f"AVX512-BF16 is switched off by {_HIGHEST}={os.environ[_HIGHEST].strip()}"
    return loaded


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or the reason why it is not available."""
    if os.environ.get(_SWITCH, "").strip() == "0":
        return f"switched off by {_SWITCH}=0"
    if not LIBRARY.is_file():
        return "not built: there was no C++ compiler when millpond was installed"
    try:
        loaded = ctypes.CDLL(str(LIBRARY))  # its functions run without the GIL
        _declare(loaded)
        stale = loaded.millpond_source_hash() != source_hash()
    except (OSError, AttributeError) as error:
        logger.warning("the compiled kernels are not used: %s; install millpond again to rebuild them", error)
        return "the library cannot be loaded; install millpond again"
    if stale:
        logger.warning("the compiled kernels are not used: they were built from other sources; install millpond again")
        return "built from other sources; install millpond again"
    _pin(loaded)
    return loaded


def _pin(loaded: ctypes.CDLL) -> None:
    """Keep each of the kernels' threads on a core, if ``MILLPOND_PIN`` says so; callers go where they like."""
    setting = os.environ.get(_PIN, "").strip()
    if setting not in ("", "0", "1"):
        logger.warning("%s=%s is ignored; it may be 0 or 1", _PIN, setting)
    if setting != "1":
        return
    if not hasattr(os, "sched_getaffinity"):
        logger.warning("%s=1 is ignored: this system does not keep threads on cores", _PIN)
        return
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    loaded.millpond_pin_workers((ctypes.c_int32 * len(cores))(*cores), len(cores))


def _declare(loaded: ctypes.CDLL) -> None:
    """The signatures of the C functions.

    Raises:
        AttributeError: The library has no function of a name.
    """
    loaded.millpond_source_hash.restype = ctypes.c_uint64
    loaded.millpond_checksum.argtypes = [_pointer, _int]
    loaded.millpond_checksum.restype = ctypes.c_uint64
    loaded.millpond_kernel_table.argtypes = [_pointer, ctypes.c_int]
    loaded.millpond_kernel_table.restype = ctypes.c_int
    loaded.millpond_kernel_table_bytes.restype = _int
    loaded.millpond_plan_bytes.argtypes = [_pointer]
    loaded.millpond_plan_bytes.restype = None
    ends: list[Any] = [_pointer, _int, _int]  # special tokens around a text
    loaded.millpond_wordpiece.argtypes = [
        *[_pointer] * 3,
        *[_int] * 2,
        *[_pointer] * 2,
        *[_int] * 2,
        ctypes.c_int32,
        ctypes.c_int,
        *ends,
    ]
    loaded.millpond_wordpiece.restype = _pointer
    loaded.millpond_wordpiece_free.argtypes = [_pointer]
    loaded.millpond_wordpiece_free.restype = None
    loaded.millpond_wordpiece_split.argtypes = [*[_pointer] * 3, _int, *[_pointer] * 2]
    loaded.millpond_wordpiece_split.restype = None
    loaded.millpond_byte_pairs.argtypes = [_pointer, _int, *[_pointer] * 4, _int, *[ctypes.c_int] * 2, *ends]
    loaded.millpond_byte_pairs.restype = _pointer
    loaded.millpond_byte_pairs_free.argtypes = [_pointer]
    loaded.millpond_byte_pairs_free.restype = None
    loaded.millpond_byte_pairs_split.argtypes = loaded.millpond_wordpiece_split.argtypes
    loaded.millpond_byte_pairs_split.restype = None
    loaded.millpond_ward.argtypes = [*[_pointer] * 6, _int, _int, _pointer]
    loaded.millpond_ward.restype = None
    loaded.millpond_add_rows.argtypes = [*[_pointer] * 3, *[_int] * 2]
    loaded.millpond_add_rows.restype = None
    loaded.millpond_wake_workers.argtypes = [_int]
    loaded.millpond_wake_workers.restype = None
    loaded.millpond_pin_workers.argtypes = [_pointer, _int]
    loaded.millpond_pin_workers.restype = None
    loaded.millpond_finish_rows.argtypes = [_pointer, *[_int] * 2, ctypes.c_int]
    loaded.millpond_finish_rows.restype = ctypes.c_int
    loaded.millpond_mean_rows.argtypes = [*[_pointer] * 5, *[_int] * 3]
    loaded.millpond_mean_rows.restype = None
    if loaded.millpond_supported():
        _declare_torch_kernels(loaded)


def _declare_torch_kernels(loaded: ctypes.CDLL) -> None:
    """The signatures of the functions for the torch backend."""
    loaded.millpond_attention_call_bytes.restype = _int
    loaded.millpond_attention_workspace.argtypes = [_int, _int]
    loaded.millpond_attention_workspace.restype = _int
    loaded.millpond_attention_tasks.argtypes = [_int, _int, _int]
    loaded.millpond_attention_tasks.restype = _int
    loaded.millpond_attention.argtypes = [_pointer]
    loaded.millpond_attention.restype = None
    loaded.millpond_add_norm.argtypes = [*[_pointer] * 4, *[_int] * 4, _float, _int]
    loaded.millpond_add_norm.restype = None
    loaded.millpond_rms_norm.argtypes = [*[_pointer] * 3, *[_int] * 6, _float, _float, _int]
    loaded.millpond_rms_norm.restype = None
    loaded.millpond_apply_rotary.argtypes = [*[_pointer] * 4, *[_int] * 8]
    loaded.millpond_apply_rotary.restype = None
