"""The demo's output: colours on a terminal, plain lines in a pipe."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import typer

WIDTH = 100
_STAGE_COLUMN = 18
_NAME_COLUMN = 36


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A passage that answers a question.

    Attributes:
        name: Dotted name of the documented object.
        summary: First sentence of its docstring.
        score: MaxSim: for each token of the question its highest cosine with a token of the passage, summed.
        search_rank: Its rank in the search, from 1.
    """

    name: str
    summary: str
    score: float
    search_rank: int


class Stage:
    """A timed part of the run; ``note`` is printed after its time, which runs until the block ends."""

    def __init__(self) -> None:
        self.note = ""
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self._start


def start(title: str) -> None:
    """Print the title; from here on, what the terminal cannot encode is replaced."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    heading(title)


def heading(text: str) -> None:
    """Print a heading between blank lines."""
    typer.echo("\n" + typer.style(text, bold=True) + "\n")


def paragraph(text: str) -> None:
    """Print a wrapped paragraph and a blank line."""
    typer.echo("\n".join(typer.style(line, dim=True) for line in textwrap.wrap(text, _width())) + "\n")


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


def answers(question: str, best: Sequence[Answer]) -> None:
    """Print a question and its answers."""
    typer.echo(typer.style(question, bold=True))
    for rank, answer in enumerate(best, start=1):
        name = _fit(answer.name, _NAME_COLUMN).ljust(_NAME_COLUMN)
        cells = f"{rank:>3}  ", name, f"{answer.score:>6.2f}  ", f"{f'#{answer.search_rank}':>3}  "
        summary = _fit(answer.summary, max(1, _width() - sum(map(len, cells))))
        green = typer.style(name, fg="green") if rank == 1 else name
        typer.echo(cells[0] + green + typer.style(cells[2], fg="cyan") + typer.style(cells[3], dim=True) + summary)
    typer.echo("")


def _width() -> int:
    """A pipe has no width."""
    return min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH) if sys.stdout.isatty() else WIDTH


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
