"""RunNote: what a collection keeps of the runs that filled it, so that a row can be traced to where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Self

# Notes of a collection. Runs that are alike share one, so that a source that is ingested every hour is one note.
_KEPT = 16


@dataclass(frozen=True, kw_only=True)
class RunNote:
    """A run that changed a collection, or several alike in a row.

    Attributes:
        command: ``ingest`` or ``copy``.
        source: What was read: the absolute path of a file or folder, a collection, or the kind of an object.
        chunking: How texts were cut; empty if they were not.
        version: The version of millpond.
        first: When the first of these runs began: UTC, ISO 8601.
        last: When the last one began.
        runs: How many they are.
        run: The id that the last one left in the collection.
    """

    command: str
    source: str
    chunking: str = ""
    version: str = ""
    first: str = ""
    last: str = ""
    runs: int = 1
    run: str = ""

    @classmethod
    def now(cls, command: str, source: str, *, chunking: str = "") -> RunNote:
        """The note of a run that begins.

        Args:
            command: ``ingest`` or ``copy``.
            source: What is read.
            chunking: How texts are cut.

        Returns:
            A note without an id.
        """
        from millpond import __version__

        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        return cls(command=command, source=source, chunking=chunking, version=__version__, first=time, last=time)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The note that :meth:`to_json` made; keys of a later version are left out."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})

    def to_json(self) -> dict[str, Any]:
        """The note as JSON."""
        return asdict(self)

    def after(self, earlier: Sequence[RunNote]) -> tuple[RunNote, ...]:
        """The notes of a collection with this one, which takes the place of its own earlier state.

        Args:
            earlier: The collection's notes, the oldest first.

        Returns:
            At most 16 notes.
        """
        if earlier and self._is_like(before := earlier[-1]):
            again = 0 if before.last == self.last else self.runs
            return (*earlier[:-1], replace(self, first=before.first, runs=before.runs + again))
        return (*earlier, self)[-_KEPT:]

    def _is_like(self, other: RunNote) -> bool:
        names = ("command", "source", "chunking", "version")
        return all(getattr(self, name) == getattr(other, name) for name in names)
