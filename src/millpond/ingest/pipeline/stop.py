"""StopRequest: the wish that a run ends soon, in a state from which it can be resumed."""

from __future__ import annotations

import threading


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
