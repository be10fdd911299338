"""WatchState: what a watcher has done and what waits, as its metrics and its end say it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from millpond.ingest.telemetry.trace import RunTrace


@dataclass(frozen=True, kw_only=True)
class WatchReport:
    """What a watcher did until it was stopped.

    Attributes:
        passes: Changes that it took over, the first reading of the whole source included.
        written: Rows that the database acknowledged.
        deleted: Rows of what the source has no more.
        embedded: Records whose vector was computed.
        failed: Records and files that were left out.
        retried: Requests sent again.
        stopped: Always true: it ends when it is asked to.
    """

    passes: int = 0
    written: int = 0
    deleted: int = 0
    embedded: int = 0
    failed: int = 0
    retried: int = 0
    stopped: bool = True


class WatchState:
    """Counts, and the last error. Any thread may use it.

    Attributes:
        oldest: Returns when the oldest change was noticed that is not in the collection, by ``time.monotonic``.
        waiting: Records that wait for their deletion.
        held: Why they are not deleted; empty if they will be.
        unanswered: Whether the database did not answer the last request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("passes", "written", "deleted", "embedded", "failed", "retried", "errors"), 0)
        self.oldest: Callable[[], float | None] = lambda: None
        self.waiting = 0
        self.held = ""
        self.unanswered = False
        self.last_error = ""
        self.last_error_at = 0.0  # by the clock

    def add(self, **counts: int) -> None:
        """Add to the counts."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def now(self) -> dict[str, int]:
        """The counts."""
        with self._lock:
            return dict(self._counts)

    def note_error(self, reason: str) -> None:
        """Something failed."""
        with self._lock:
            self._counts["errors"] += 1
            self.last_error, self.last_error_at = reason, time.time()

    def age(self) -> float:
        """Seconds since the oldest change that is not in the collection; 0 if there is none."""
        oldest = self.oldest()
        return 0.0 if oldest is None else max(0.0, time.monotonic() - oldest)

    def report(self) -> WatchReport:
        """The counts as a report."""
        counts = self.now()
        del counts["errors"]
        return WatchReport(stopped=True, **counts)


class WatchTrace(RunTrace):
    """Tells the state of retries and failures while a run goes on."""

    def __init__(self, state: WatchState) -> None:
        super().__init__(vectors=0)
        self._state = state

    def note_retry(self, reason: str) -> None:
        """A request is sent again."""
        self._state.add(retried=1)
        self._state.unanswered = True
        self._state.note_error(reason)

    def note_failure(self, where: str, reason: str) -> None:
        """A record is left out."""
        self._state.add(failed=1)
        self._state.note_error(f"{where}: {reason}")
