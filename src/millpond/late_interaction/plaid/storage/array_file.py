"""Array files: named numpy arrays in one file that is written once and mapped into memory.

Layout: 8 bytes ``MPARRAYS``, the length of the header (uint32) and its CRC-32 (uint32), the header as JSON, and the
arrays, each from a multiple of 64 bytes. All numbers are little-endian. One file for a segment needs one fsync.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from millpond.errors import IndexCorruptedError

_MAGIC = b"MPARRAYS"
_START = struct.Struct("<8sII")
_ALIGNMENT = 64
_DTYPES = ("int8", "uint8", "uint16", "uint32", "uint64", "int64", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """What an array is before it is written."""

    dtype: str  # numpy's name of its type
    shape: tuple[int, ...]  # its shape

    @property
    def itemsize(self) -> int:
        """Bytes of one element along the first axis."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return self.shape[0] * self.itemsize


class ArrayFileWriter:
    """Writes a new file of these arrays, in order; they may be filled in any order and in parts.

    ``mode`` says who may read the file, before the umask.
    """

    def __init__(self, path: Path, arrays: Mapping[str, ArraySpec], *, mode: int = 0o666) -> None:
        if sys.byteorder != "little":
            raise OSError(f"{path} cannot be written: array files are little-endian, and this processor is not")
        described: dict[str, Any] = {}
        # The header holds offsets that depend on its own length: they count from its end.
        offset = 0
        for name, spec in arrays.items():
            described[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "offset": offset}
            offset += -(-spec.bytes // _ALIGNMENT) * _ALIGNMENT
        header = json.dumps(described).encode()
        self._specs = dict(arrays)
        data = -(-(_START.size + len(header)) // _ALIGNMENT) * _ALIGNMENT
        self._offsets = {name: data + int(array["offset"]) for name, array in described.items()}
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")
        self._file.write(_START.pack(_MAGIC, len(header), zlib.crc32(header)))
        self._file.write(header)
        self._end = data + offset

    def write(self, name: str, values: npt.NDArray[Any] | bytes, start: int = 0) -> None:
        """Write elements of an array from index ``start`` of its first axis."""
        spec = self._specs[name]
        if isinstance(values, np.ndarray):
            if values.dtype != np.dtype(spec.dtype) or values.shape[1:] != spec.shape[1:]:
                raise ValueError(f"{values.dtype} {values.shape} are no rows of {name}, {spec}")
            data: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        else:
            data = values
        if start * spec.itemsize + len(data) > spec.bytes:
            raise ValueError(f"{len(data)} bytes from {start} do not fit {name}, {spec}")
        self._file.seek(self._offsets[name] + start * spec.itemsize)
        self._file.write(data)

    def close(self) -> None:
        """Complete the file. The caller syncs it."""
        self._file.truncate(self._end)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(OSError):  # its buffer cannot be written either
                self._file.close()


class ArrayFile:
    """A mapped file. It stays readable after its name was removed, and in a forked child.

    FileNotFoundError if there is none; IndexCorruptedError if it has another ``size`` (a mapped file that is shorter
    ends the process when it is read) or a damaged header.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        with path.open("rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != size:
                raise IndexCorruptedError(f"{path} has {actual} bytes instead of {size}; restore it, or build it anew")
            if size < _START.size:
                raise IndexCorruptedError(f"{path} has no header; restore it, or build the index anew")
            mapped = self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        try:
            self._map(mapped, size)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise IndexCorruptedError(
                f"{path} has a damaged header ({error}); restore it, or build the index anew"
            ) from error

    def check(self, sha256: str) -> None:
        """Read all of it; IndexCorruptedError if its checksum is another one."""
        if hashlib.sha256(self._mapped).hexdigest() != sha256:
            raise IndexCorruptedError(
                f"{self.path} is damaged: its checksum is not the one in the manifest; restore it, or build the index "
                "anew"
            )

    def _map(self, mapped: mmap.mmap, size: int) -> None:
        magic, length, checksum = _START.unpack_from(mapped)
        if magic != _MAGIC:
            raise ValueError("its first bytes are not those of an array file")
        header = mapped[_START.size : _START.size + length]
        if len(header) != length or zlib.crc32(header) != checksum:
            raise ValueError("its checksum differs")
        data = -(-(_START.size + length) // _ALIGNMENT) * _ALIGNMENT
        for name, array in json.loads(header).items():
            if array["dtype"] not in _DTYPES:
                raise ValueError(f"{name} is of type {array['dtype']}")
            spec = ArraySpec(dtype=array["dtype"], shape=tuple(array["shape"]))
            offset = data + array["offset"]
            if offset + spec.bytes > size:
                raise ValueError(f"{name} ends behind the file")
            self.arrays[name] = np.ndarray(spec.shape, spec.dtype, buffer=mapped, offset=offset)
