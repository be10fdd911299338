"""SourceItems: the records of a source, up to its end, its error or the end of a run that a StopRequest ends."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from millpond.ingest.record import Record, Rejected


class ReadInterrupted(BaseException):
    """Raised by :meth:`StopRequest.interrupt` inside the source, whose next item is not waited for."""


class StopRequest(threading.Event):
    """An event that a run looks at between two records; once it is set, the run writes what is embedded, and returns.

    Attributes:
        reading: Whether the run's own thread waits for the source: :meth:`interrupt` then ends the waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reading = False

    def interrupt(self) -> None:
        """Set the event from a signal handler, which runs in the thread of the run."""
        self.set()
        if self.reading:
            self.reading = False
            raise ReadInterrupted


class SourceItems:
    """The items of a source, up to its end or its exception, which is kept for after the last write."""

    def __init__(self, items: Iterable[Record | Rejected], stop: threading.Event) -> None:
        self._items = iter(items)
        self._read = 0
        # A signal handler may end the waiting for the next item.
        self._stop: Any = stop if isinstance(stop, StopRequest) else StopRequest()
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Record | Rejected]:
        while True:
            try:
                item = self._next()
            except (StopIteration, ReadInterrupted):
                return
            except Exception as error:
                error.add_note(f"ingest: raised by the source at item {self._read} (from 0); those before are written")
                self.error = error
                return
            yield item
            self._read += 1

    def _next(self) -> Any:
        # Only in here does a signal end the waiting, wherever it arrives, so that the caller handles it.
        self._stop.reading = True
        try:
            return next(self._items)
        finally:
            self._stop.reading = False
