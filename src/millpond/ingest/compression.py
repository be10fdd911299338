"""Compressed sources: .gz and .zst files, opened as what they hold."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from millpond.errors import InvalidRequestError, MissingExtraError, SourceNotFoundError

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
