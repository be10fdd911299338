"""The library of the compiled kernels, called through ctypes: nothing links it, and every Python of a platform can.

It is built from the sources beside this file when the package is built or installed, if there is a C++ compiler.
``MILLPOND_NATIVE=0`` leaves it alone.
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


def sources() -> int:
    """A number for the sources beside this file, which the build writes into the library."""
    digest = hashlib.sha256()
    for path in sorted(path for kind in ("*.cpp", "*.h") for path in LIBRARY.parent.glob(kind)):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:8], "big")


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; ``None`` where they were not built, this processor cannot run them, or they are switched off."""
    if os.environ.get(_SWITCH, "").strip() == "0" or not LIBRARY.is_file():
        return None
    try:
        found = ctypes.CDLL(str(LIBRARY))  # a call gives the interpreter's lock away
        if not found.millpond_fits():
            return None
        found.millpond_sources.restype = ctypes.c_uint64
        found.millpond_attention_bytes.restype = _int
        found.millpond_attention_room.argtypes = [_int, _int]
        found.millpond_attention_room.restype = _int
        found.millpond_attention_units.argtypes = [_int, _int, _int]
        found.millpond_attention_units.restype = _int
        found.millpond_attention.argtypes = [_pointer]
        found.millpond_attention.restype = None
        found.millpond_add_norm.argtypes = [*[_pointer] * 4, *[_int] * 4, _float, _int]
        found.millpond_add_norm.restype = None
        found.millpond_rms_norm.argtypes = [*[_pointer] * 3, *[_int] * 6, _float, _float, _int]
        found.millpond_rms_norm.restype = None
        found.millpond_turn.argtypes = [*[_pointer] * 4, *[_int] * 8]
        found.millpond_turn.restype = None
        stale = found.millpond_sources() != sources()
    except (OSError, AttributeError) as error:
        logger.warning("the compiled kernels are left out: %s; installing millpond again builds them anew", error)
        return None
    if stale:
        logger.warning("the compiled kernels are left out: they were built from other sources; install millpond again")
        return None
    return found
