"""The library of the compiled kernels, loaded with ctypes: it links to no Python, so one build serves all versions.

It is built from the sources in this folder when the package is built or installed, if there is a C++ compiler.
``MILLPOND_NATIVE=0`` switches it off.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("libmillpond.so")
_SWITCH = "MILLPOND_NATIVE"
_int, _float, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


def source_hash() -> int:
    """A hash of the sources in this folder; the build writes it into the library."""
    digest = hashlib.sha256()
    for path in sorted(path for kind in ("*.cpp", "*.h") for path in LIBRARY.parent.glob(kind)):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:8], "big")


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; ``None`` if they were not built, are switched off, or this processor cannot run them.

    A build that is broken, or of other sources, is not used either, and logged as a warning.
    """
    loaded = _load()
    return None if isinstance(loaded, str) else loaded


def unavailable() -> str | None:
    """The reason why :func:`library` returns ``None``; ``None`` if it returns the kernels."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


@cache
def _load() -> ctypes.CDLL | str:
    """The kernels, or the reason why they are not available."""
    if os.environ.get(_SWITCH, "").strip() == "0":
        return f"switched off by {_SWITCH}=0"
    if not LIBRARY.is_file():
        return "not built: there was no C++ compiler when millpond was installed"
    try:
        loaded = ctypes.CDLL(str(LIBRARY))  # its functions run without the GIL
        if not loaded.millpond_supported():
            return "this processor has no AVX512-BF16"
        _declare(loaded)
        stale = loaded.millpond_source_hash() != source_hash()
    except (OSError, AttributeError) as error:
        logger.warning("the compiled kernels are not used: %s; install millpond again to rebuild them", error)
        return "the library cannot be loaded; install millpond again"
    if stale:
        logger.warning("the compiled kernels are not used: they were built from other sources; install millpond again")
        return "built from other sources; install millpond again"
    return loaded


def _declare(loaded: ctypes.CDLL) -> None:
    """The signatures of the C functions.

    Raises:
        AttributeError: The library has no function of a name.
    """
    loaded.millpond_source_hash.restype = ctypes.c_uint64
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
