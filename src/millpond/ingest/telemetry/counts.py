"""RunCounts: the counts of a run in progress."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

from millpond.engine.schedule.truncation import log_truncated
from millpond.ingest.telemetry.report import IngestReport

logger = logging.getLogger(__name__)

_NAMES = (
    "read", "cached", "unchanged", "embedded", "failed", "duplicates", "blank", "written", "deleted", "truncated",
    "retried",
)  # fmt: skip
_MAX_WARNINGS = 1000
_NAMED_IDS = 10
_SHOWN_CHARS = 80


class RunCounts:
    """The counts of a run, updated by the reading and the writing thread."""

    def __init__(self) -> None:
        self.read = 0
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((*_NAMES, "finished"), 0)
        self._truncated_ids: list[str] = []
        self._blank_ids: list[str] = []
        self._start = time.perf_counter()

    def add(self, **counts: int) -> None:
        """Add to the counts; ``finished`` counts the records that are written, or need not be."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def now(self) -> dict[str, int]:
        """All counts by their names in :class:`~millpond.ingest.IngestReport`, and ``finished`` records."""
        with self._lock:
            return {**self._counts, "read": self.read}

    def failed(self, where: str, reason: str) -> None:
        """Count and log a record or line that is left out."""
        number = self._counts["failed"]
        # A file of the wrong kind fails on every line; this many warnings show it.
        logger.log(logging.WARNING if number < _MAX_WARNINGS else logging.DEBUG, "left out %s: %s", where, reason)
        if number == _MAX_WARNINGS:
            logger.warning("more than %d records were left out; the rest is logged at DEBUG", _MAX_WARNINGS)
        self.add(failed=1, finished=1)

    def truncated(self, ids: Iterable[str]) -> None:
        """Count texts that were cut."""
        self.add(truncated=_note(self._truncated_ids, ids))

    def blank(self, record_id: str) -> None:
        """Count a record whose text is blank."""
        self.add(blank=_note(self._blank_ids, [record_id]), finished=1)

    def log_summary(self, max_length: int) -> None:
        """Log once which texts were cut, and which records are blank."""
        counts = self.now()
        texts = counts["cached"] + counts["embedded"]
        log_truncated(counts["truncated"], texts, max_length, list(map(_shown, self._truncated_ids)))
        if blank := counts["blank"]:
            more = blank - len(self._blank_ids)
            logger.warning(
                "left out %d of %d records, whose text is blank (keep_blank=True keeps them): %s",
                blank,
                counts["read"],
                ", ".join(map(_shown, self._blank_ids)) + (f" and {more} more" if more else ""),
            )

    def report(self, **others: Any) -> IngestReport:
        """The counts so far, and the seconds since the run began, with the other values of a report."""
        counts: dict[str, Any] = self.now()
        del counts["finished"]
        if others.get("stopped"):  # what was read and not dealt with is read again
            counts["read"] = sum(counts[name] for name in ("cached", "embedded", "failed", "duplicates", "blank"))
        return IngestReport(
            **counts,
            truncated_ids=tuple(self._truncated_ids),
            seconds=time.perf_counter() - self._start,
            **others,
        )


def _note(first: list[str], ids: Iterable[str]) -> int:
    """Keep the first ids; returns the number of all."""
    count = 0
    for record_id in ids:
        count += 1
        if len(first) < _NAMED_IDS:
            first.append(record_id)
    return count


def _shown(record_id: str) -> str:
    return record_id if len(record_id) <= _SHOWN_CHARS else f"{record_id[:_SHOWN_CHARS]}..."
