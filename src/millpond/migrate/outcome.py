"""Outcome: what a command of a migration did."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.ingest.sinks.succession import Phase


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command did.

    Attributes:
        collection: The name by which the collection is used.
        serving: The collection that answers by it now.
        other: The one that does not; empty if there is none.
        phase: What was done last.
        rows: How many rows the serving collection has.
        written: Rows that were embedded and written.
        deleted: Rows that were deleted.
        failed: Records that could not be embedded or stored, for which nothing was cut over.
        passes: How often the rows were gone through.
        recall: The expected recall of the bridge; ``None`` without one.
        stopped: Whether it was stopped; the same command goes on.
        seconds: How long it took.
    """

    collection: str
    serving: str
    other: str
    phase: Phase | None
    rows: int
    written: int = 0
    deleted: int = 0
    failed: int = 0
    passes: int = 0
    recall: float | None = None
    stopped: bool = False
    seconds: float = 0.0
