"""How the demo looks: lines and columns, in colour on a terminal and plain anywhere else."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.table import Table
from rich.text import Text

from millpond.cli.demo_search import Answered

WIDTH = 100
_RANK, _NAME, _SCORE, _PLACE = 3, 36, 5, 3  # columns of the answers


class Stage:
    """A part of the run while it is timed."""

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
        console = Console(highlight=False)
        # A pipe has no width of its own, and rich would take 80 columns.
        self._console = Console(highlight=False, width=min(console.width, WIDTH) if console.is_terminal else WIDTH)

    def title(self, text: str) -> None:
        """A heading with air around it."""
        self._console.print()
        self._console.print(Text(text, style="bold"))
        self._console.print()

    def text(self, text: str) -> None:
        """A paragraph, and air below it."""
        self._console.print(Text(text, style="dim"))
        self._console.print()

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
        row = Table.grid(padding=(0, 2))
        row.add_column(width=18)
        row.add_column(width=8, justify="right")
        row.add_column()
        row.add_row(Text(name), Text("" if seconds is None else f"{seconds:.2f} s", style="cyan"), Text(note))
        self._console.print(row)

    def answers(self, answered: Answered) -> None:
        """A question with its answers."""
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=_RANK, justify="right")
        table.add_column(width=_NAME, no_wrap=True, overflow="ellipsis")
        table.add_column(width=_SCORE, justify="right")
        table.add_column(width=_PLACE, justify="right")
        # The rest, but never so little that rich would narrow the other columns in its favour.
        rest = self._console.width - sum((_RANK, _NAME, _SCORE, _PLACE)) - 4 * 2
        table.add_column(width=max(rest, 8), no_wrap=True, overflow="ellipsis")
        for rank, answer in enumerate(answered.answers, start=1):
            table.add_row(
                Text(str(rank), style="dim"),
                Text(answer.name, style="green" if rank == 1 else ""),
                Text(f"{answer.score:.2f}", style="cyan"),
                Text(f"#{answer.place}", style="dim"),
                Text(answer.summary),
            )
        self._console.print(Text(answered.question, style="bold"))
        self._console.print(table)
        self._console.print()
