"""Compressed sources: .gz and .zst files, opened as what they hold."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from millpond.errors import InvalidRequestError, MissingExtraError, SourceNotFoundError


class SourcePosition:
    """How much of a file is read, for a bar: bytes of the file itself, compressed or not."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self.size = 0  # of the file that was opened last

    def opened(self, file: BinaryIO) -> None:
        """A file is opened; the position is the one in it."""
        self._file, self.size = file, os.fstat(file.fileno()).st_size

    def read(self) -> int | None:
        """Bytes read; all of them once the file is closed, and ``None`` before one is opened."""
        if self._file is None:
            return None
        try:
            return self.size if self._file.closed else self._file.tell()
        except (OSError, ValueError):  # a pipe, or closed meanwhile
            return self.size


_position: ContextVar[SourcePosition | None] = ContextVar("position", default=None)


@contextmanager
def watch_position() -> Iterator[SourcePosition]:
    """The position in the files that are opened while the block runs, in this thread."""
    position = SourcePosition()
    token = _position.set(position)
    try:
        yield position
    finally:
        _position.reset(token)


COMPRESSIONS = (".gz", ".zst")
_READ_BYTES = 1 << 15  # of compressed data, which may be ten thousand times as many


def kind_of(path: Path) -> str:
    """The suffix that names the kind of a file, in lower case, without that of its compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


@contextmanager
def open_source(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if its name ends with .gz or .zst.

    Raises:
        InvalidRequestError: The file cannot be read, or its compressed data is damaged or ends early; also raised by
            the code inside the ``with``, when it reads as far.
        MissingExtraError: The package that reads .zst is not installed.
    """
    compression = path.suffix.lower()
    decompressor = _zstd() if compression == ".zst" else None
    try:
        with path.open("rb") as file:
            if (position := _position.get()) is not None:
                position.opened(file)
            if compression == ".gz":
                yield cast("BinaryIO", gzip.GzipFile(fileobj=file))
            elif decompressor is not None:
                yield cast("BinaryIO", io.BufferedReader(_Frames(file, decompressor), _READ_BYTES))
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, _DamagedError) as error:
        raise InvalidRequestError(
            f"{str(path)!r} is damaged, or not a {compression} file ({error}); write it again"
        ) from error
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"there is no file at {str(path)!r}") from error
    except OSError as error:
        raise InvalidRequestError(f"{str(path)!r} cannot be read ({error.strerror or error})") from error


def check_source(path: Path) -> None:
    """Read the first byte, so that a file that cannot be opened or decompressed is an error at once."""
    with open_source(path) as file:
        file.read(1)


class _DamagedError(Exception):
    """Compressed data that ends early, or is none."""


class _Frames(io.RawIOBase):
    """The decompressed bytes of a file of one or more compressed frames.

    Args:
        file: The compressed file.
        decompressor: Makes an object for one frame, with ``decompress``, ``eof`` and ``unused_data``.
    """

    def __init__(self, file: BinaryIO, decompressor: Callable[[], Any]) -> None:
        super().__init__()
        self._file = file
        self._new = decompressor
        self._frame: Any = None
        self._rest = b""  # read from the file, not yet decompressed
        self._ready = memoryview(b"")  # decompressed, not yet read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._rest or self._file.read(_READ_BYTES)
            self._rest = b""
            if not data:
                if self._frame is not None:
                    raise _DamagedError("it ends early")
                return 0
            if self._frame is None:
                self._frame = self._new()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except Exception as error:  # each library has its own class
                raise _DamagedError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def _zstd() -> Callable[[], Any]:
    """A function that makes a decompressor for one frame of zstd."""
    try:
        library = import_module("zstandard")
    except ImportError:
        raise MissingExtraError("reading .zst needs zstandard: pip install 'millpond[zstd]'") from None
    return lambda: library.ZstdDecompressor().decompressobj()
