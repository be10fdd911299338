"""Checked files: written once and synced, with a checksum that every reader compares."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import IndexCorruptedError


class FileWriter:
    """A new file that only its owner may read.

    Attributes:
        path: The file.
        bytes: Bytes written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._digest = hashlib.sha256()
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    @classmethod
    def array(cls, path: Path, dtype: str, shape: tuple[int, ...]) -> FileWriter:
        """A .npy file, before its rows."""
        writer = cls(path)
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(writer, header)
        return writer

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._digest.update(data)
        self._file.write(data)
        self.bytes += len(data)

    def write_rows(self, rows: npt.NDArray[Any]) -> None:
        """Append an array as it is in memory."""
        self.write(_bytes(np.ascontiguousarray(rows)))

    def finish(self) -> dict[str, Any]:
        """Sync the file and close it; returns its entry in the manifest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return {"name": self.path.name, "bytes": self.bytes, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class FileReader:
    """A file that is read once, from its beginning to its end.

    Args:
        file: The open file.
        path: Its path, for errors.
        entry: Its entry in the manifest.
    """

    def __init__(self, file: BufferedReader, path: Path, entry: dict[str, Any]) -> None:
        self.path = path
        self._file = file
        self._expected = str(entry["sha256"])
        self._digest = hashlib.sha256()
        self._dtype = np.dtype(np.uint8)
        self._columns: tuple[int, ...] = ()
        self._pending = b""
        self._size = os.fstat(file.fileno()).st_size
        if self._size != entry["bytes"]:
            raise IndexCorruptedError(f"{path} is damaged: it has {self._size} bytes instead of {entry['bytes']}")

    def header(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and shape of a .npy file."""
        with damage_of(self.path):
            version = np.lib.format.read_magic(self)
            if version != (1, 0):
                raise ValueError(f"version {version}")
            try:
                shape, fortran, self._dtype = np.lib.format.read_array_header_1_0(self)
            except (SyntaxError, TokenError) as error:
                raise ValueError("its header is no Python literal") from error
            if fortran or self._dtype.hasobject:
                raise ValueError("not an array in rows")
            # Before memory is taken for it.
            if self._file.tell() + math.prod(shape) * self._dtype.itemsize != self._size:
                raise ValueError(f"its header says {self._dtype} {shape}, which is not its size")
        self._columns = shape[1:]
        return self._dtype, shape

    def rows(self, count: int) -> npt.NDArray[Any]:
        """The next rows of a .npy file."""
        rows = np.empty((count, *self._columns), dtype=self._dtype)
        memory = _bytes(rows)
        if self._file.readinto(memory) != len(memory):
            raise IndexCorruptedError(f"{self.path} is damaged: it ends too early")
        self._digest.update(memory)
        return rows

    def array(self) -> npt.NDArray[Any]:
        """The whole array of a .npy file."""
        _, shape = self.header()
        with damage_of(self.path):
            rows = self.rows(*shape[:1] or (1,))
        self.finish()
        return rows

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, as numpy reads its header."""
        data = self._file.read(size)
        self._digest.update(data)
        return data

    def line(self) -> bytes:
        """The next line."""
        line = self._file.readline()
        self._digest.update(line)
        return line

    def finish(self) -> None:
        """Compare the checksum. Everything must have been read."""
        if self.read(1) or self._digest.hexdigest() != self._expected:
            raise IndexCorruptedError(f"{self.path} is damaged: its checksum is not the one it was written with")


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


@contextmanager
def damage_of(path: Path) -> Iterator[None]:
    """Errors of reading content that is not what was written, as IndexCorruptedError."""
    try:
        yield
    except IndexCorruptedError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
        raise IndexCorruptedError(f"{path} is damaged: {error}") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
