"""Succession: which collection answers by the name of another one, while its model is changed and afterwards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Phase = Literal["filling", "sealed", "live", "rolled back", "finished"]
"""What a migration does: it fills the new collection; holds writers back, to copy their last rows; has cut over; has
gone back; has dropped the collection that does not serve."""


@dataclass(frozen=True, kw_only=True)
class Succession:
    """A part of a collection's manifest, which every sink that is opened by the collection's name follows.

    It is replaced in one request, so a sink sees the collections as they were before a cut-over, or as they are after.

    Attributes:
        serving: The collection that searches and writes by this name use: its own name, a name at the same location, or
            a URL of another one.
        other: The collection that does not serve: before the cut-over the new one, after it the old one.
        phase: What was done last.
        since: When the phase began, in seconds since 1970.
        rows: How many rows the new collection held when the command began that fills it.
        until: Until when writers wait, in seconds since 1970; then they go on, since the command must have died.
        recall: The expected recall of the bridge; ``None`` without one.
        former: The fingerprint of the model whose questions the bridge takes to ``serving``, after it has cut over.
        rechunks: How texts were cut anew; empty if the new collection has the chunks of the old one.
    """

    serving: str
    other: str = ""
    phase: Phase = "filling"
    since: float = 0.0
    rows: int = 0
    until: float = 0.0
    recall: float | None = None
    former: str = ""
    rechunks: str = ""

    @property
    def new(self) -> str:
        """The collection that the migration fills, or has filled."""
        return self.serving if self.phase in ("live", "finished") else self.other

    @property
    def wait(self) -> float:
        """Seconds that writers have to wait; 0 if they need not."""
        return max(0.0, self.until - time.time()) if self.phase == "sealed" else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without what is not set."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None, 0)}

    @classmethod
    def from_dict(cls, data: object) -> Succession | None:
        """As it is stored; ``None`` if nothing is.

        Raises:
            ValueError: It is of a later version.
        """
        if data is None:
            return None
        if not isinstance(data, Mapping) or data["phase"] not in get_args(Phase) or data.keys() - cls.__annotations__:
            raise ValueError("another form of succession")
        return cls(**data)


def bridge_name(collection: str) -> str:
    """The name of the collection that holds the bridge of a migration to ``collection``, at the same location."""
    head, mark, name = collection.rpartition("#")
    return f"{head}{mark}{name}_bridge"
