"""The library of the compiled kernels, called through ctypes: nothing links it, and every Python of a platform can.

It is built from the sources beside this file when the package is built or installed, if there is a C++ compiler.
``MILLPOND_NATIVE=0`` leaves it alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("libmillpond.so")
SWITCH = "MILLPOND_NATIVE"
# What a call of the attention passes: the library says what it expects, which tells one built from other sources.
CALL_BYTES = 29 * 8
_int, _pointer = ctypes.c_int64, ctypes.c_void_p


@cache
def library() -> ctypes.CDLL | None:
    """The kernels; ``None`` where they were not built, this processor cannot run them, or they are switched off."""
    if os.environ.get(SWITCH, "").strip() == "0" or not LIBRARY.is_file():
        return None
    try:
        found = ctypes.CDLL(str(LIBRARY))  # a call gives the interpreter's lock away
        if not found.millpond_fits():
            return None
        found.millpond_attention_bytes.restype = _int
        found.millpond_attention_room.argtypes = [_int, _int]
        found.millpond_attention_room.restype = _int
        found.millpond_attention.argtypes = [_pointer]
        found.millpond_attention.restype = None
        found.millpond_add_norm.argtypes = [*[_pointer] * 4, *[_int] * 4, ctypes.c_double, _int]
        found.millpond_add_norm.restype = None
        found.millpond_rms_norm.argtypes = [*[_pointer] * 3, *[_int] * 6, ctypes.c_double, _int]
        found.millpond_rms_norm.restype = None
        found.millpond_turn.argtypes = [*[_pointer] * 4, *[_int] * 8]
        found.millpond_turn.restype = None
        stale = found.millpond_attention_bytes() != CALL_BYTES
    except (OSError, AttributeError) as error:
        logger.warning("the compiled kernels are left out: %s; installing millpond again builds them anew", error)
        return None
    if stale:
        logger.warning("the compiled kernels are left out: they are of another version; install millpond again")
        return None
    return found
