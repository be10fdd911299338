"""RunCounts: the counts of a run in progress."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from millpond.ingest.report import IngestReport

logger = logging.getLogger(__name__)

_MAX_WARNINGS = 1000


class RunCounts:
    """The counts of a run, updated by the reading and the writing thread."""

    def __init__(self, advance: Callable[[int], object]) -> None:
        self._advance = advance
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("read", "cached", "embedded", "failed", "duplicates", "written"), 0)
        self._start = time.perf_counter()

    def add(self, **counts: int) -> None:
        """Add to the counts; the bar advances by the records that are finished: written or left out."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
            if finished := sum(counts.get(name, 0) for name in ("written", "failed", "duplicates")):
                self._advance(finished)

    def failed(self, where: str, reason: str) -> None:
        """Count and log a record or line that is left out."""
        number = self._counts["failed"]
        # A file of the wrong kind fails on every line; this many warnings show it.
        logger.log(logging.WARNING if number < _MAX_WARNINGS else logging.DEBUG, "left out %s: %s", where, reason)
        if number == _MAX_WARNINGS:
            logger.warning("more than %d records were left out; the rest is logged at DEBUG", _MAX_WARNINGS)
        self.add(failed=1)

    def report(self) -> IngestReport:
        """The counts so far, and the seconds since the run began."""
        return IngestReport(**self._counts, seconds=time.perf_counter() - self._start)
