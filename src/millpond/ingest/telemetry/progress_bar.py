"""IngestProgress: the progress bar of a run, with its rate, the time left, cache hits and queue depths."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from millpond.ingest.sources.compression import SourcePosition
from millpond.progress import draw_bar, in_notebook

if TYPE_CHECKING:
    from tqdm import tqdm

_INTERVAL = 0.2  # seconds between two drawings
_TICK = 1.0  # seconds after which a bar that nobody updates is drawn again: its clock goes on
_RATE_SECONDS = 10.0  # what is older counts less than 1 / e in the rate


class IngestProgress:
    """The bar of a run, drawn in a terminal and in a notebook, at most five times a second.

    ::

         43%|████▎     | 4,301/10,000 records in 00:12, 350/s, 00:16 left, hits 43 %, embed 2/2, write 1/2

    While it is drawn, lines that a log writes to the terminal appear above it. Its methods may be called from any
    thread.

    Args:
        show: Draw it, if standard error is a terminal or this is a notebook.
        total: Number of records, if it is known.
        size: Bytes of the source, if only they are known: the share of them that is finished is then drawn.
        source: The position in a source that is a file, which has its size once it is opened.
        computed: Returns how many texts the engine has computed since the run began. A call of many texts takes long;
            meanwhile this number moves.
        clock: Returns seconds.
    """

    def __init__(
        self,
        *,
        show: bool,
        total: int | None = None,
        size: int | None = None,
        source: SourcePosition | None = None,
        computed: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._total = total
        self._size = None if total is not None else size or None  # an empty file has no shares
        end = total if total is not None else self._size
        ends = "{percentage:3.0f}%|{bar}| " if end else ""
        self._bar: tqdm[Any] = draw_bar(
            show=show, total=end, mininterval=0, dynamic_ncols=True, bar_format=f"{ends}{{desc}}"
        )
        self._stack = ExitStack()
        self._start = self._drawn = clock()
        self._records = _Rate()
        self._shares = _Rate()  # of the bar: records or bytes
        self._finished = 0
        self._counts: dict[str, int] = {}
        self._computed = computed
        self._source = source
        self._last: dict[str, Any] = {"read": 0, "finished": 0}
        if not self._bar.disable:
            self._draw(self._start, "")
            stopped = threading.Event()
            ticker = threading.Thread(target=self._tick, args=[stopped], name="millpond-progress", daemon=True)
            ticker.start()
            self._stack.callback(ticker.join)
            self._stack.callback(stopped.set)  # called first
            if not in_notebook():  # there the log has an area of its own
                self._stack.enter_context(_log_above_bar())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(
        self,
        *,
        read: int,
        finished: int,
        cached: int = 0,
        embedded: int = 0,
        failed: int = 0,
        retried: int = 0,
        queues: Mapping[str, tuple[int, int]] | None = None,
        position: int | None = None,
    ) -> None:
        """Draw the state of the run, if the last drawing is old enough. Counts are those since the run began.

        Args:
            read: Records read.
            finished: Of these the records that are written or left out.
            cached: Records whose vector came from the cache.
            embedded: Records whose vector was computed.
            failed: Records left out with an error.
            retried: Writes sent again.
            queues: For each queue, items that wait in it and its limit.
            position: Bytes of the source that were read for ``read`` records.
        """
        if self._bar.disable:
            return
        self._last = {
            "read": read,
            "finished": finished,
            "cached": cached,
            "embedded": embedded,
            "failed": failed,
            "retried": retried,
            "queues": queues,
            "position": position,
        }
        now = self._clock()
        if now - self._drawn < _INTERVAL:
            return
        with self._lock:
            if now - self._drawn < _INTERVAL:  # another thread has drawn meanwhile
                return
            if self._source is not None and self._total is None:
                position = self._source.read() if position is None else position
                self._set_size(self._source.size)
            if self._size is not None and position is not None and read:
                # Reading is ahead of writing by what waits in the queues.
                done = min(position * finished / read, self._size)
            else:
                done = finished
            if self._bar.total and (self._total is not None or position is not None):
                done = max(done, self._bar.n)
                self._shares.add(done - self._bar.n, now - self._drawn)
                self._bar.n = done
            self._records.add(finished - self._finished, now - self._drawn)
            self._finished = finished
            self._counts = {"cached": cached, "embedded": embedded, "failed": failed, "retried": retried}
            self._drawn = now
            depths = "".join(f", {name} {waiting}/{limit}" for name, (waiting, limit) in (queues or {}).items())
            self._draw(now, f"{self._rates()}{self._ahead()}{self._facts()}{depths}")

    def _set_size(self, size: int) -> None:
        """Draw the share of this many bytes from now on, unless a share is drawn already."""
        if self._size is None and size:
            self._size = self._bar.total = size
            self._bar.bar_format = "{percentage:3.0f}%|{bar}| {desc}"

    def finish(self, *, finished: int, cached: int = 0, embedded: int = 0, failed: int = 0, retried: int = 0) -> None:
        """Draw the end of a run that read its whole source: the whole bar, and the mean rate."""
        if self._bar.disable:
            return
        with self._lock:
            self._bar.n = self._bar.total or finished
            self._finished = finished
            self._counts = {"cached": cached, "embedded": embedded, "failed": failed, "retried": retried}
            now = self._clock()
            seconds = max(now - self._start, 1e-9)
            self._draw(now, f", {_number(finished / seconds)}/s{self._facts()}")

    def close(self) -> None:
        """Leave the bar as it was drawn last, and the log as it was."""
        self._stack.close()
        self._bar.close()

    def _tick(self, stopped: threading.Event) -> None:
        while not stopped.wait(_TICK):
            self.update(**self._last)

    def _draw(self, now: float, text: str) -> None:
        bar = self._bar
        of = "" if self._total is None else f"/{self._total:,}"
        line = f"{self._finished:,}{of} records in {bar.format_interval(now - self._start)}{text}"
        bar.set_description_str(line)

    def _rates(self) -> str:
        rate, speed = self._records.per_second(), self._shares.per_second()
        text = f", {_number(rate)}/s"
        if self._bar.total and speed > 0:
            text += f", {self._bar.format_interval(round((self._bar.total - self._bar.n) / speed))} left"
        return text

    def _ahead(self) -> str:
        """What the engine has computed of calls that have not ended."""
        ahead = 0 if self._computed is None else self._computed() - self._counts["embedded"]
        return f", {ahead:,} computed" if ahead > 0 else ""

    def _facts(self) -> str:
        counts = self._counts
        vectors = counts["cached"] + counts["embedded"]
        text = f", hits {100 * counts['cached'] / vectors:.0f} %" if vectors else ""
        text += f", {counts['failed']:,} failed" if counts["failed"] else ""
        return text + (f", {counts['retried']:,} retried" if counts["retried"] else "")


class _Rate:
    """A rate, in which what is long ago counts less."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        decay = math.exp(-seconds / _RATE_SECONDS)
        self._amount = self._amount * decay + amount
        self._seconds = self._seconds * decay + seconds

    def per_second(self) -> float:
        return self._amount / self._seconds if self._seconds else 0.0


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"


@contextmanager
def _log_above_bar() -> Iterator[None]:
    """While the block runs, log lines for the terminal clear the bar, and the bar is drawn again below them.

    tqdm's own ``logging_redirect_tqdm`` replaces the handlers and loses their levels; here only the stream changes.
    """
    from tqdm import tqdm

    class AboveBar:
        """A stream that writes above the bars."""

        def __init__(self, stream: TextIO) -> None:
            self._stream = stream

        def write(self, text: str) -> None:
            tqdm.write(text, file=self._stream, end="")

        def flush(self) -> None:
            self._stream.flush()

    with ExitStack() as stack:
        for handler in {*logging.getLogger().handlers, *logging.getLogger("millpond").handlers}:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout):
                stack.callback(handler.setStream, handler.stream)
                handler.setStream(AboveBar(handler.stream))
        last_resort = logging.lastResort  # writes what no handler takes
        if last_resort is not None:
            above = logging.StreamHandler(cast("TextIO", AboveBar(sys.stderr)))
            above.setLevel(last_resort.level)
            stack.callback(setattr, logging, "lastResort", last_resort)
            logging.lastResort = above
        yield
