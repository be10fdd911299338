"""IngestReport: the counts of one run of ingest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class IngestReport:
    """The counts of one run; ``read == cached + embedded + failed + duplicates`` always holds.

    Attributes:
        read: Records and bad lines read from the source.
        cached: Records whose vector came from the engine's cache.
        embedded: Records whose vector was computed.
        failed: Lines that held no record, and records that could not be embedded or stored; each was logged.
        duplicates: Records dropped because a later record of the same batch has the same id.
        written: Rows that the database acknowledged.
        retried: Writes sent again; always 0 in this version.
        seconds: Wall time from the first record read to the last acknowledgement.
    """

    read: int
    cached: int
    embedded: int
    failed: int
    duplicates: int
    written: int
    retried: int = 0
    seconds: float

    def __post_init__(self) -> None:
        parts = self.cached + self.embedded + self.failed + self.duplicates
        if self.read != parts:
            raise ValueError(f"read={self.read} is not cached + embedded + failed + duplicates = {parts}")
