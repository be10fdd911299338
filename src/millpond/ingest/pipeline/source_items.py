"""SourceItems: the records of a source, up to its end, its error or the end of a run that a StopRequest ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.pipe import ReadInterrupted
from millpond.ingest.sources.read import RecordReader


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
    """The items of a source, up to its end or its exception, which is kept for after the last write.

    While the next one is waited for, ``turn`` is free: another thread may have it.
    """

    def __init__(self, reader: RecordReader, stop: threading.Event, turn: Any) -> None:
        self._items = iter(reader)
        self._read = 0
        self._turn = turn
        # A signal handler may end the waiting for the next item; a pipe looks at the event itself.
        self._stop: Any = stop if isinstance(stop, StopRequest) and reader.pipe is None else StopRequest()
        self._ends_itself = reader.pipe is not None
        self._stopped = stop
        if reader.pipe is not None:
            reader.pipe.stop = stop
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[Record | Rejected]:
        stop, turn, following = self._stop, self._turn, self._items.__next__
        while self._ends_itself or not self._stopped.is_set():
            turn.release()
            try:
                # Only in here does a signal end the waiting, wherever it arrives, so that it is handled below.
                stop.reading = True
                try:
                    item = following()
                finally:
                    stop.reading = False
            except (StopIteration, ReadInterrupted):
                return
            except Exception as error:
                error.add_note(f"ingest: raised by the source at item {self._read} (from 0); those before are written")
                self.error = error
                return
            finally:
                turn.acquire()
            yield item
            self._read += 1
