"""Pipes: standard input, named pipes and devices, which are read once and may stand still."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any, cast

from millpond.errors import InvalidRequestError, SourceNotFoundError

_LOOK_SECONDS = 0.2  # between two looks at the stop event


class ReadInterrupted(BaseException):
    """Ends the waiting for the next item of a source."""


class Pipe(io.RawIOBase):
    """What a descriptor yields; :attr:`stop` ends it between two reads, so that nothing that was read is lost."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.stop: threading.Event | None = None
        self._ready = b""  # what was read already
        # Without O_NONBLOCK, opening a named pipe waits for its writer.
        self._own = path is not None
        self._descriptor = _open(path) if path is not None else sys.stdin.buffer.fileno()
        if path is None:
            self._ready = _buffered(self._descriptor)
        self._waiting = select.poll() if hasattr(select, "poll") else None  # not on Windows
        if self._waiting is not None:
            self._waiting.register(self._descriptor, select.POLLIN)

    def readable(self) -> bool:
        """As of every file that is read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there into ``buffer``, or wait for it; raises ReadInterrupted once :attr:`stop` is set."""
        if not self._ready:
            self._ready = self._read(len(buffer))
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        """Close the descriptor, but not that of standard input."""
        if self._own and not self.closed:
            os.close(self._descriptor)
        super().close()

    def _read(self, size: int) -> bytes:
        while True:
            if self.stop is not None and self.stop.is_set():
                raise ReadInterrupted
            if self._waiting is None or self._waiting.poll(1000 * _LOOK_SECONDS):
                try:
                    return os.read(self._descriptor, size)
                except BlockingIOError:  # another process was faster
                    continue


def open_pipe(path: Path | None) -> tuple[io.BufferedReader, Pipe | None]:
    """A named pipe or standard input (``None``) for reading; without a Pipe if it has no descriptor, as in a test."""
    if path is None:
        check_standard_input()
        try:
            sys.stdin.buffer.fileno()
        except (OSError, ValueError):
            return cast("io.BufferedReader", sys.stdin.buffer), None
    pipe = Pipe(path)
    return io.BufferedReader(pipe), pipe


def check_standard_input() -> None:
    """Raise InvalidRequestError if the caller closed standard input."""
    if sys.stdin is None or sys.stdin.closed:
        raise InvalidRequestError("standard input is closed; name a file, or pipe records in")


def is_pipe(path: Path) -> bool:
    """Whether a path is that of a named pipe, a descriptor (``/dev/fd/63``) or a device."""
    return path.exists() and not path.is_dir() and (not path.is_file() or path.is_relative_to("/dev"))


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise SourceNotFoundError(f"there is no file at {str(path)!r}") from None
    except OSError as error:
        raise InvalidRequestError(f"{str(path)!r} cannot be read ({error.strerror or error})") from error


def _buffered(descriptor: int) -> bytes:
    """What the program has read of standard input, and not used."""
    if not hasattr(os, "set_blocking"):
        return b""
    blocking = os.get_blocking(descriptor)
    os.set_blocking(descriptor, False)
    try:
        stream = cast("io.BufferedReader", sys.stdin.buffer)
        ready = stream.peek()
        stream.read(len(ready))
    finally:
        os.set_blocking(descriptor, blocking)
    return bytes(ready)
