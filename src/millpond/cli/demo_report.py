"""How the demo looks: lines and columns, in colour on a terminal and plain anywhere else."""

from __future__ import annotations

import io
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.text import Text

from millpond.cli.demo_search import Answered

WIDTH = 100
_STAGE = 18
_NAME = 36


class Stage:
    """A part of the run while it is timed.

    Attributes:
        note: What to say of it when it is done.
    """

    def __init__(self) -> None:
        self.note = ""
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time since the stage began."""
        return time.perf_counter() - self._start


class DemoReport:
    """Prints the demo's lines to standard output as they come about."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a docstring may hold what the terminal cannot show
        self._console = Console(highlight=False)
        # A pipe has no width of its own, and rich would take 80 columns.
        self._width = min(self._console.width, WIDTH) if self._console.is_terminal else WIDTH

    def title(self, text: str) -> None:
        """A heading with air around it."""
        self._line("")
        self._line(Text(text, style="bold"))
        self._line("")

    def text(self, text: str) -> None:
        """A paragraph, and air below it."""
        for line in textwrap.wrap(text, self._width):
            self._line(Text(line, style="dim"))
        self._line("")

    @contextmanager
    def stage(self, name: str, *, bar: bool = False) -> Iterator[Stage]:
        """Time what happens inside, then print it with the note that it left.

        Args:
            name: What happens.
            bar: Whether it draws a bar of its own; else a spinner turns meanwhile.
        """
        stage = Stage()
        with nullcontext() if bar else self._console.status(f"{name} ..."):
            yield stage
        self.timed(name, stage.seconds, stage.note)

    def timed(self, name: str, seconds: float | None, note: str) -> None:
        """A line of the table of stages."""
        time_taken = "" if seconds is None else f"{seconds:.2f} s"
        self._line(Text.assemble(_fit(name, _STAGE), (f"{time_taken:>9}  ", "cyan"), note))

    def answers(self, answered: Answered) -> None:
        """A question with its answers."""
        self._line(Text(answered.question, style="bold"))
        for rank, answer in enumerate(answered.answers, start=1):
            line = Text.assemble(
                (f"{rank:>3}  ", "dim"),
                (_fit(answer.name, _NAME), "green" if rank == 1 else ""),
                (f"{answer.score:>6.2f}  ", "cyan"),
                (f"{f'#{answer.place}':>3}  ", "dim"),
                answer.summary,
            )
            line.truncate(self._width, overflow="ellipsis")
            self._line(line)
        self._line("")

    def _line(self, line: Text | str) -> None:
        self._console.print(line, soft_wrap=True)


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"
