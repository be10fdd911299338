"""A tokenizer of the compiled library: token ids of texts, without the ``tokenizers`` package."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.native.library import portable

# The versions that unicode_tables.h has the characters of; with others, only texts in ASCII are split here.
_CHARACTERS_OF = "0.23."
# A text of so many bytes, and a token for each: a longer one is split without the GIL.
_ROOM = 4096


class _Room(threading.local):
    """Where a thread's short texts are split: an array of its own for each would take longer than the tokens."""

    def __init__(self) -> None:
        self.ids = np.empty(_ROOM, dtype=np.int32)
        self.count = ctypes.c_int64()
        self.end = ctypes.c_int64()
        self.addresses = (ctypes.addressof(self.end), self.ids.ctypes.data, ctypes.addressof(self.count))


class NativeTokenizer:
    """The tokens of those texts that the library splits as ``tokenizers`` does."""

    def __init__(self, handle: int, name: str, *, around: int) -> None:
        """``name``: the tokenizer's functions are ``millpond_<name>_``; ``around``: special tokens around a text."""
        self._handle = handle
        self._around = around
        self._split = getattr(native(), f"millpond_{name}_split")
        self._split_holding = _holding(name)
        self._room = _Room()
        self._longest = _ROOM - around - 1
        weakref.finalize(self, getattr(native(), f"millpond_{name}_free"), handle)

    def one(self, text: str) -> npt.NDArray[np.int32] | None:
        """int32 ``[tokens]`` of a text, special tokens included; ``None``: it is long, or as for :meth:`split`."""
        try:
            data = text.encode()
        except UnicodeEncodeError:  # a lone surrogate
            return None
        length = len(data)
        if length > self._longest:
            return None
        room = self._room
        room.end.value = length
        end, ids, count = room.addresses
        self._split_holding(self._handle, data, end, 1, ids, count)
        found = room.count.value
        return None if found < 0 else room.ids[:found].copy()

    def split(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32] | None]:
        """int32 ``[tokens]`` of each text, special tokens included; ``None``: ``tokenizers`` must split it."""
        joined, sizes = _encoded(texts)
        ends = np.fromiter(accumulate(sizes), dtype=np.int64, count=len(sizes))
        ids = np.empty(len(joined) + len(sizes) * (self._around + 1), dtype=np.int32)
        counts = np.empty(len(sizes), dtype=np.int64)
        self._split(self._handle, joined, ends.ctypes.data, len(sizes), ids.ctypes.data, counts.ctypes.data)
        ids = ids[: int(counts.clip(min=0).sum())].copy()
        found: list[npt.NDArray[np.int32] | None] = []
        start = 0
        for size in counts.tolist():
            found.append(None if size < 0 else ids[start : start + size])
            start += max(0, size)
        return found


def native() -> ctypes.CDLL:
    """The library, which is there."""
    loaded = portable()
    assert loaded is not None
    return loaded


def knows_characters() -> bool:
    """Whether unicode_tables.h was written for the installed ``tokenizers``, whose characters may change."""
    return version("tokenizers").startswith(_CHARACTERS_OF)


def _encoded(texts: Sequence[str]) -> tuple[bytes, list[int]]:
    """The texts in UTF-8 one after another, and the bytes of each."""
    joined = "".join(texts)
    if joined.isascii():
        return joined.encode(), [len(text) for text in texts]
    parts = [text.encode(errors="surrogatepass") for text in texts]  # a surrogate is refused
    return b"".join(parts), [len(part) for part in parts]


@cache
def _holding(name: str) -> Any:
    """The function that splits, for a short text: it keeps the GIL, which takes as long to get back as the tokens."""
    library = ctypes.PyDLL(native()._name, handle=native()._handle)
    function: Any = getattr(library, f"millpond_{name}_split")
    function.argtypes = getattr(native(), f"millpond_{name}_split").argtypes
    function.restype = None
    return function
