"""IngestReport, and RunCounts: the counts of a run, at its end and in progress."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millpond.engine.schedule.truncation import log_truncated
from millpond.support.text_names import shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a look into the database found after a run."""

    rows: int  # rows that the collection holds
    expected: int  # rows that it should hold: those of the journal
    missing: int  # rows of the journal that the collection lacks; their entries are removed: the next run writes them
    compared: int = 0  # rows whose texts and metadata were compared with the records of the source
    sampled: int  # rows whose vectors were compared with the engine's
    different: int  # records of which a row has another text, other metadata or another vector

    @property
    def good(self) -> bool:
        """Whether nothing is missing, and nothing different."""
        return self.missing == 0 and self.different == 0 and self.rows >= self.expected


@dataclass(frozen=True, kw_only=True)
class IngestReport:
    """The counts of one run; ``read == cached + embedded + failed + duplicates + blank`` always holds.

    Attributes:
        read: Records and bad lines read from the source; of a run that was stopped, those it dealt with.
        cached: Records whose vector was not computed: it came from the engine's cache, or is in the collection.
        unchanged: Of these, the records that the journal knows as written, and which were neither embedded nor written.
        embedded: Records whose vector was computed.
        failed: Lines that held no record, and records that could not be embedded or stored; each was logged.
        duplicates: Records dropped because a later record of the same batch has the same id.
        blank: Records left out because their text is blank (``keep_blank=True`` keeps them).
        written: Rows that the database acknowledged.
        truncated: Of the cached and embedded texts those that were cut to the engine's ``max_length``.
        truncated_ids: Ids of the first ten of them.
        skipped: Files of a source's folder that were not read: of another kind, ignored by git, and some links.
        skipped_files: Paths of the first ten of them.
        retried: Requests sent again, since the database did not answer them or was too busy.
        deleted: Rows deleted because the text of their record is blank now, or, with ``sync=True``, because the source
            has the record no more.
        uncached: Vectors that the engine's cache could not store.
        cache_error: Why it could not; ``None`` if it could.
        stopped: Whether the run was stopped before the end of the source; running again goes on where it was.
        verification: What ``verify=True`` found.
        seconds: Wall time from the first record read to the last acknowledgement.
    """

    read: int
    cached: int
    embedded: int
    failed: int
    duplicates: int
    blank: int = 0
    written: int
    truncated: int = 0
    truncated_ids: tuple[str, ...] = ()
    skipped: int = 0
    skipped_files: tuple[str, ...] = ()
    retried: int = 0
    unchanged: int = 0
    deleted: int = 0
    uncached: int = 0
    cache_error: str | None = None
    stopped: bool = False
    verification: Verification | None = None
    seconds: float

    def __post_init__(self) -> None:
        parts = self.cached + self.embedded + self.failed + self.duplicates + self.blank
        if self.read != parts:
            raise ValueError(f"read={self.read} is not cached + embedded + failed + duplicates + blank = {parts}")


_NAMES = (
    "read", "cached", "unchanged", "embedded", "failed", "duplicates", "blank", "written", "deleted", "truncated",
    "retried",
)  # fmt: skip
_MAX_WARNINGS = 1000
_NAMED_IDS = 10


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
        log_truncated(counts["truncated"], texts, max_length, list(map(shown, self._truncated_ids)))
        if blank := counts["blank"]:
            more = blank - len(self._blank_ids)
            logger.warning(
                "left out %d of %d records, whose text is blank (keep_blank=True, or --keep-blank, keeps them): %s",
                blank,
                counts["read"],
                ", ".join(map(shown, self._blank_ids)) + (f" and {more} more" if more else ""),
            )

    def report(self, **others: Any) -> IngestReport:
        """The counts so far, and the seconds since the run began, with the other values of a report."""
        counts: dict[str, Any] = self.now()
        del counts["finished"]
        if others.get("stopped"):  # what was read and not dealt with is read again
            counts["read"] = sum(counts[name] for name in ("cached", "embedded", "failed", "duplicates", "blank"))
        return IngestReport(
            **counts, truncated_ids=tuple(self._truncated_ids), seconds=time.perf_counter() - self._start, **others
        )


def _note(first: list[str], ids: Iterable[str]) -> int:
    """Keep the first ids; returns the number of all."""
    count = 0
    for record_id in ids:
        count += 1
        if len(first) < _NAMED_IDS:
            first.append(record_id)
    return count
