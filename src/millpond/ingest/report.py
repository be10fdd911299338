"""IngestReport: the counts of one run of ingest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class IngestReport:
    """The counts of one run; ``read == cached + embedded + failed + duplicates + empty`` always holds.

    Attributes:
        read: Records and bad lines read from the source.
        cached: Records whose vector came from the engine's cache.
        embedded: Records whose vector was computed.
        failed: Lines that held no record, and records that could not be embedded or stored; each was logged.
        duplicates: Records dropped because a later record of the same batch has the same id.
        empty: Records left out because their text is blank (``keep_empty=True`` keeps them).
        written: Rows that the database acknowledged.
        truncated: Of the cached and embedded texts those that were cut to the engine's ``max_length``.
        truncated_ids: Ids of the first ten of them.
        skipped: Files of a source's folder that were not read, since they are no .txt or .md.
        skipped_files: Paths of the first ten of them.
        retried: Writes sent again; always 0 in this version.
        seconds: Wall time from the first record read to the last acknowledgement.
    """

    read: int
    cached: int
    embedded: int
    failed: int
    duplicates: int
    empty: int = 0
    written: int
    truncated: int = 0
    truncated_ids: tuple[str, ...] = ()
    skipped: int = 0
    skipped_files: tuple[str, ...] = ()
    retried: int = 0
    seconds: float

    def __post_init__(self) -> None:
        parts = self.cached + self.embedded + self.failed + self.duplicates + self.empty
        if self.read != parts:
            raise ValueError(f"read={self.read} is not cached + embedded + failed + duplicates + empty = {parts}")
