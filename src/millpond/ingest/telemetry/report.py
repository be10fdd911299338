"""IngestReport: the counts of one run of ingest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a look into the database found after a run."""

    rows: int  # rows that the collection holds
    expected: int  # rows that it should hold: those of the journal
    missing: int  # rows of the journal that the collection lacks; their entries are removed: the next run writes them
    sampled: int  # rows whose vectors were compared with the engine's
    different: int  # of these, rows with another text or another vector

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
        skipped: Files of a source's folder that were not read, since they are no .txt or .md.
        skipped_files: Paths of the first ten of them.
        retried: Requests sent again, since the database did not answer them or was too busy.
        deleted: Rows deleted because the source has their records no more (``sync=True``).
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
