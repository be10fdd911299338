"""The demo's output: colours on a terminal, plain lines in a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

WIDTH = 100
_STAGE_COLUMN = 18
_NAME_COLUMN = 36


class Stage:
    """A timed part of the run; ``note`` is printed behind its time."""

    def __init__(self) -> None:
        self.note = ""
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self._start


@contextmanager
def stage(name: str) -> Iterator[Stage]:
    """Time the block, then print a line of the table of stages."""
    timed = Stage()
    yield timed
    row(name, timed.note, timed.seconds)


def row(name: str, note: str, seconds: float | None = None) -> None:
    """Print a line of the table of stages."""
    column = "" if seconds is None else f"{seconds:.2f} s"
    typer.echo(f"{name:<{_STAGE_COLUMN}}" + typer.style(f"{column:>9}  ", fg="cyan") + note)


def heading(text: str) -> None:
    """Print a heading between blank lines."""
    typer.echo("\n" + typer.style(text, bold=True) + "\n")


def paragraph(text: str) -> None:
    """Print a wrapped paragraph and a blank line."""
    typer.echo("\n".join(typer.style(line, dim=True) for line in textwrap.wrap(text, _width())) + "\n")


def answer(rank: int, name: str, score: float, search_rank: int, summary: str) -> None:
    """Print a passage that answers a question: its MaxSim, and its rank in the search."""
    shown = _fit(name, _NAME_COLUMN).ljust(_NAME_COLUMN)
    cells = f"{rank:>3}  {shown}{score:>6.2f}  {f'#{search_rank}':>3}  "
    typer.echo(typer.style(cells, fg="green" if rank == 1 else None) + _fit(summary, max(1, _width() - len(cells))))


def _width() -> int:
    """A pipe has no width."""
    return min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH) if sys.stdout.isatty() else WIDTH


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
