"""What is written: standard output that is full, or was closed before the program began, and files."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from millpond.errors import MillpondError


class StandardOutput(io.FileIO):
    """The file behind standard output, which remembers why it could not be written."""

    problem: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write bytes."""
        try:
            return super().write(data)
        except OSError as error:
            self.problem = error
            raise


def watch_output() -> None:
    """Let standard output remember its errors, unless somebody has put another object there."""
    if type(sys.stdout) is io.TextIOWrapper:
        raw = StandardOutput(sys.stdout.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=sys.stdout.encoding, errors="replace", line_buffering=raw.isatty()
        )


def output_problem() -> OSError | None:
    """Why what was printed cannot be written; ``None`` if it is."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return error
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.problem if isinstance(raw, StandardOutput) else None


def drop_output() -> None:
    """Let the interpreter's last flush go nowhere: it would fail again, with a traceback."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of a file, whose errors become one that names it."""
    try:
        yield
    except OSError as error:
        raise MillpondError(
            f"{str(path)!r} cannot be written ({error.strerror}); make room, or name another"
        ) from error
