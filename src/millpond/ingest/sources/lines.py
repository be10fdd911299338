"""Lines of a stream, of which none takes more than a bounded part of memory."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from typing import BinaryIO, TextIO, cast

MAX_RECORD_BYTES = 16 << 20
"""Most bytes of a line, of a cell and of a folder's file that is read; of a CSV and a large ``.json`` most characters.

A compressed file of a megabyte may hold a line of a gigabyte.
"""

_BLOCK_BYTES = 1 << 14
_SKIPPED_CHARS = 1 << 20


def read_lines(file: BinaryIO) -> Iterator[bytes | int]:
    """The lines of a stream without their ends; in place of one that is longer than the limit, its size."""
    parts: list[bytes] = []  # of a line whose end was not read yet
    size = 0
    read1 = cast("BufferedReader", file).read1  # of a pipe what is there
    while block := read1(_BLOCK_BYTES):
        first, *lines = block.split(b"\n")
        size += len(first)
        if size <= MAX_RECORD_BYTES:
            parts.append(first)
        else:
            parts.clear()
        if lines:
            yield b"".join(parts) if size <= MAX_RECORD_BYTES else size
            last = lines.pop()
            yield from lines
            parts, size = [last], len(last)
    if size:
        yield b"".join(parts) if size <= MAX_RECORD_BYTES else size


def read_text_lines(file: TextIO) -> Iterator[str | int]:
    """The same of a stream of characters, with the line ends."""
    most = MAX_RECORD_BYTES + 1  # with a line end
    while line := file.readline(most):
        yield line if len(line) < most or line.endswith(("\n", "\r")) else len(line) + _skip_line(file)


def _skip_line(file: TextIO) -> int:
    """Read the rest of a line, and return its size."""
    size = 0
    while part := file.readline(_SKIPPED_CHARS):
        size += len(part)
        if part.endswith(("\n", "\r")):
            break
    return size


def too_long(noun: str, size: int | None = None, most: int = MAX_RECORD_BYTES) -> str:
    """Why something is left out that is longer than the limit: a line, an element, a cell, a file."""
    has = "is longer than" if size is None else f"has {size:,} bytes, and is longer than"
    of = "record" if most == MAX_RECORD_BYTES else noun
    return f"the {noun} {has} {most >> 20} MiB, the most that is read of one {of}; cut it into several"
