"""The demo's output: colours on a terminal, plain text in a pipe."""

from __future__ import annotations

import io
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.text import Text

from millpond.cli.demo.search import AnsweredQuestion

WIDTH = 100
_STAGE_COLUMN = 18
_NAME_COLUMN = 36


class Stage:
    """A timed part of the run.

    Attributes:
        note: Text to print after the time when the stage is done.
    """

    def __init__(self) -> None:
        self.note = ""
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self._start


class DemoReport:
    """Prints the demo's lines to standard output."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # the terminal may not encode every docstring
        self._console = Console(highlight=False)
        # A pipe has no width; rich would assume 80 columns.
        self._width = min(self._console.width, WIDTH) if self._console.is_terminal else WIDTH

    def title(self, text: str) -> None:
        """Print a heading between blank lines."""
        self._line("")
        self._line(Text(text, style="bold"))
        self._line("")

    def text(self, text: str) -> None:
        """Print a wrapped paragraph and a blank line."""
        for line in textwrap.wrap(text, self._width):
            self._line(Text(line, style="dim"))
        self._line("")

    @contextmanager
    def stage(self, name: str, *, bar: bool = False) -> Iterator[Stage]:
        """Time the block, then print a line with its time and its ``note``.

        Args:
            name: Name of the stage.
            bar: The block draws its own progress bar; otherwise a spinner is shown.
        """
        stage = Stage()
        with nullcontext() if bar else self._console.status(f"{name} ..."):
            yield stage
        self.timed(name, stage.seconds, stage.note)

    def timed(self, name: str, seconds: float | None, note: str) -> None:
        """Print a line of the table of stages."""
        time_column = "" if seconds is None else f"{seconds:.2f} s"
        self._line(Text.assemble(_fit(name, _STAGE_COLUMN), (f"{time_column:>9}  ", "cyan"), note))

    def answers(self, answered: AnsweredQuestion) -> None:
        """Print a question and its answers."""
        self._line(Text(answered.question, style="bold"))
        for rank, answer in enumerate(answered.answers, start=1):
            line = Text.assemble(
                (f"{rank:>3}  ", "dim"),
                (_fit(answer.name, _NAME_COLUMN), "green" if rank == 1 else ""),
                (f"{answer.score:>6.2f}  ", "cyan"),
                (f"{f'#{answer.search_rank}':>3}  ", "dim"),
                answer.summary,
            )
            line.truncate(self._width, overflow="ellipsis")
            self._line(line)
        self._line("")

    def _line(self, line: Text | str) -> None:
        self._console.print(line, soft_wrap=True)


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"
