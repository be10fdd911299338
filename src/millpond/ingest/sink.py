"""Sink: where ingest writes vectors. A database usually derives its sink from CollectionSink, which has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from millpond.errors import InvalidRequestError
from millpond.ingest.batch import WriteBatch
from millpond.ingest.record import Record
from millpond.spec import ModelSpec


class Sink(Protocol):
    """The methods that :func:`~millpond.ingest.ingest` calls.

    More attributes are optional: ``dimensions``, the widths to store (by default the width that ``embed`` returns),
    and the methods of :class:`Checks` and :class:`Deletes`. One run calls from one thread at a time.
    """

    def prepare(self, spec: ModelSpec) -> None:
        """Open the collection, or create it, before anything is read.

        Raises:
            FingerprintMismatchError: The collection was built by another model, or not by millpond.
        """

    def write(self, batch: WriteBatch) -> None:
        """Store every row, replacing those whose id exists, and return once the database has acknowledged them."""

    def close(self) -> None:
        """Release the resources that the sink opened itself."""


@runtime_checkable
class Checks(Protocol):
    """A sink that can refuse a record before it is embedded."""

    def check(self, record: Record) -> None:
        """Raise :class:`~millpond.errors.InvalidRequestError` for a record that cannot be stored."""


@runtime_checkable
class Deletes(Protocol):
    """A sink that can delete records: those that an earlier run wrote, and whose text is blank now."""

    def delete(self, ids: Sequence[str], /) -> None:
        """Delete records by their ids; those that do not exist are ignored."""


def check_widths(dimensions: Sequence[int] | None) -> tuple[int, ...] | None:
    """The widths of a sink, ascending and distinct; ``None`` stands for the width that ``embed`` returns."""
    if dimensions is None:
        return None
    if isinstance(dimensions, str) or not isinstance(dimensions, Sequence) or not dimensions:
        raise InvalidRequestError(f"dimensions={dimensions!r} must be a list of widths like [128, 768], or None")
    for width in dimensions:
        if isinstance(width, bool) or not isinstance(width, int | np.integer) or width < 1:
            raise InvalidRequestError(f"dimensions={list(dimensions)!r}: {width!r} is no width; pass ints from 1")
    return tuple(sorted({int(width) for width in dimensions}))


def vector_name(width: int) -> str:
    """The name of the vector, or field, of a width."""
    return f"d{width}"
