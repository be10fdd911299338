"""IngestProgress: watches the counts of a run, for its trace and for the bar in a terminal."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from millpond.ingest.sources.compression import SourcePosition
from millpond.ingest.telemetry.report import IngestReport
from millpond.ingest.telemetry.trace import RunTrace
from millpond.support.progress import draw_bar, in_notebook

if TYPE_CHECKING:
    from tqdm import tqdm

_TICK = 0.1  # seconds between two looks at the counts
_DRAWN_TICKS = 2  # the bar is drawn at every second look
_OPEN = "{desc} in {elapsed}{postfix}"
_WHOLE = "{percentage:3.0f}%|{bar}| {desc} in {elapsed}{postfix}"
_SHARE = "{percentage:3.0f}%|{bar}| {desc} in {elapsed}, {remaining} left{postfix}"


class IngestProgress:
    """Looks at the counts of a run ten times a second, in a thread of its own.

    ::

         43%|████▎     | 4,301/10,000 records in 00:12, 00:16 left, 350/s, hits 43 %, embed 2/2, write 1/2

    The bar is drawn in a terminal and in a notebook. While it is, lines that a log writes to the terminal appear above.
    """

    def __init__(
        self,
        counts: Callable[[], Mapping[str, int]],
        queues: Callable[[], Mapping[str, tuple[int, int]]],
        *,
        show: bool,
        trace: RunTrace,
        total: int | None = None,
        position: SourcePosition | None = None,
        computed: Callable[[], int] = lambda: 0,
    ) -> None:
        self._counts = counts
        self._queues = queues
        self._trace = trace
        self._of = "" if total is None else f"/{total:,}"
        self._total = total
        self._position = SourcePosition() if position is None else position
        self._computed = computed
        self._bar: tqdm[Any] = draw_bar(
            show=show, total=total, mininterval=0, dynamic_ncols=True, bar_format=_SHARE if total else _OPEN
        )
        self._stack = ExitStack()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if not self._bar.disable and not in_notebook():  # there the log has an area of its own
            self._stack.enter_context(_log_above_bar())
        ticker = threading.Thread(target=self._tick, name="millpond-progress", daemon=True)
        ticker.start()
        self._stack.callback(ticker.join)
        self._stack.callback(self._ended.set)  # called first
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._bar.close()

    def finish(self, report: IngestReport) -> None:
        """The run has ended: keep and draw its last counts, of a run that read its whole source with the whole bar."""
        self._ended.set()
        names = ("cached", "embedded", "failed", "retried", "read", "written")
        counts = {name: int(getattr(report, name)) for name in names}
        self._trace.sample(counts, {}, last=True)
        if not self._bar.disable and not report.stopped:
            self._bar.n = self._bar.total or report.read
            self._bar.bar_format = _WHOLE if self._bar.total else _OPEN
            self._draw({**counts, "finished": report.read}, {})

    def _tick(self) -> None:
        ticks = 0
        while not self._ended.wait(_TICK):
            counts, queues = self._counts(), self._queues()
            embedded = counts["embedded"] + self._ahead(counts)
            waiting = {name: count for name, (count, _) in queues.items()}
            self._trace.sample({**counts, "embedded": embedded}, waiting)
            ticks += 1
            if not self._bar.disable and ticks % _DRAWN_TICKS == 0:
                self._move(counts)
                self._draw(counts, queues)

    def _ahead(self, counts: Mapping[str, int]) -> int:
        """How many records are computed, at most, before the others of their call; one may have several texts."""
        left = counts["read"] - counts["cached"] - counts["embedded"] - counts["failed"]
        return max(0, min(self._computed() - counts["embedded"], left))

    def _move(self, counts: Mapping[str, int]) -> None:
        """Move the bar to what is computed or finished: records, or the same share of the bytes that are read."""
        done: float = counts["finished"] + self._ahead(counts)
        if self._total is None and (size := self._position.size):
            self._bar.total, self._bar.bar_format = size, _SHARE
            # Reading is ahead of writing by what waits in the queues.
            done = min((self._position.read() or 0) * done / max(counts["read"], 1), size)
        if done > self._bar.n:  # else tqdm would take the time since its last drawing for that of the next records
            self._bar.update(done - self._bar.n)

    def _draw(self, counts: Mapping[str, int], queues: Mapping[str, tuple[int, int]]) -> None:
        bar, vectors = self._bar, counts["cached"] + counts["embedded"]
        done = counts["finished"] + (self._ahead(counts) if queues else 0)
        rate = done / max(bar.format_dict["elapsed"], 1e-9)
        facts = [f"{rate:,.0f}/s" if rate >= 10 or rate == 0 else f"{rate:.1f}/s"]
        if queues and (ahead := self._computed() - counts["embedded"]) > 0:
            facts.append(f"{ahead:,} computed")
        if vectors:
            facts.append(f"hits {100 * counts['cached'] / vectors:.0f} %")
        facts += [f"{counts[name]:,} {name}" for name in ("failed", "retried") if counts[name]]
        facts += [f"{name} {waiting}/{limit}" for name, (waiting, limit) in queues.items()]
        bar.set_description_str(f"{counts['finished']:,}{self._of} records", refresh=False)
        bar.set_postfix_str(", ".join(facts))


def _log_above_bar() -> Any:
    """While the block runs, log lines for the terminal clear the bar, and the bar is drawn again below them."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    terminal = (sys.stderr, sys.stdout)
    loggers = [
        logger
        for logger in (logging.getLogger(), logging.getLogger("millpond"))
        if any(getattr(handler, "stream", None) in terminal for handler in logger.handlers)
    ]
    return logging_redirect_tqdm(loggers or None)
