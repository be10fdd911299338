"""CopyReport: what a copy did."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.ingest.telemetry.report import Verification


@dataclass(frozen=True, kw_only=True)
class CopyReport:
    """The counts of one copy; ``read == written + unchanged + failed`` always holds.

    Attributes:
        read: Rows of the source; of a copy that was stopped, those it dealt with.
        written: Rows that the target acknowledged.
        unchanged: Rows that the target held already, with this text, this metadata and these vectors.
        failed: Rows that the target does not take, or that hold no whole record; each was logged.
        failed_ids: Ids of the first ten of them.
        deleted: Rows of the target that the source does not have, with ``sync=True``.
        retried: Requests sent again, since a database did not answer them or was too busy.
        stopped: Whether the copy was stopped before the end of the source; copying again goes on where it was.
        verification: What a look into the target found at the end; ``None`` of a copy that was stopped.
        seconds: Wall time.
    """

    read: int
    written: int
    unchanged: int = 0
    failed: int = 0
    failed_ids: tuple[str, ...] = ()
    deleted: int = 0
    retried: int = 0
    stopped: bool = False
    verification: Verification | None = None
    seconds: float

    def __post_init__(self) -> None:
        parts = self.written + self.unchanged + self.failed
        if self.read != parts:
            raise ValueError(f"read={self.read} is not written + unchanged + failed = {parts}")

    @property
    def good(self) -> bool:
        """Whether every row of the source is in the target."""
        return not (self.failed or self.stopped) and (self.verification is None or self.verification.good)
