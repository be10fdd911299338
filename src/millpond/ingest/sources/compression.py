"""Compressed sources: .gz and .zst files, opened as what they hold."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from millpond.errors import InvalidRequestError, MissingExtraError, SourceNotFoundError

COMPRESSIONS = (".gz", ".zst")
_READ_BYTES = 1 << 15  # of compressed data
_FRAME_BYTES = 1 << 11  # of .zst data, of which four bytes may be 128 KiB


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


def kind_of(path: Path) -> str:
    """The suffix that names the kind of a file, in lower case, without that of its compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


@contextmanager
def open_source(path: Path, position: SourcePosition | None = None) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if its name ends with .gz or .zst."""
    compression = path.suffix.lower()
    zstandard = None
    if compression == ".zst":
        try:
            zstandard = import_module("zstandard")
        except ImportError:
            raise MissingExtraError("reading .zst needs zstandard: pip install 'millpond[zstd]'") from None
    damaged = (EOFError, zlib.error, gzip.BadGzipFile) + (() if zstandard is None else (zstandard.ZstdError,))
    try:
        with path.open("rb") as file:
            if position is not None:
                position.opened(file)
            if compression == ".gz":
                yield cast("BinaryIO", gzip.GzipFile(fileobj=file))
            elif zstandard is not None:
                yield cast("BinaryIO", io.BufferedReader(_Blocks(_frames(file, zstandard)), _READ_BYTES))
            else:
                yield file
    except damaged as error:
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


def _frames(file: BinaryIO, zstandard: Any) -> Iterator[bytes]:
    """The decompressed bytes of one or more frames; zstandard's own reader takes a truncated file for a whole one."""
    frame = None
    while data := file.read(_FRAME_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("it ends early")


def joined(beginning: bytes, file: BinaryIO) -> BinaryIO:
    """A file whose beginning was read already."""
    blocks = chain([beginning], iter(partial(file.read, _READ_BYTES), b""))
    return cast("BinaryIO", io.BufferedReader(_Blocks(blocks), _READ_BYTES))


class _Blocks(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        super().__init__()
        self._blocks = blocks
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = memoryview(block)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
