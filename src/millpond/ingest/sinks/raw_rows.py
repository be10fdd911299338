"""RawRows: every row of a collection as its database holds it, whoever made the collection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from millpond.ingest.sinks.batch import FloatArray
from millpond.ingest.sinks.client import Connection


@dataclass(frozen=True, kw_only=True)
class VectorField:
    """A field of dense vectors.

    Attributes:
        name: Its name; empty for Qdrant's only vector, which has none.
        width: How many numbers a vector has; 0 if the database does not fix it.
        distance: What the database compares by, in its own words; ``None`` if it does not say.
        datatype: What a number is stored as, in the database's own words.
    """

    name: str
    width: int
    distance: str | None = None
    datatype: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RawPage:
    """Some rows.

    Attributes:
        ids: ``n`` ids, as the database has them.
        fields: ``n`` rows without their vectors: a payload, or columns by name.
        vectors: ``[n, width]`` float32, as stored: not scaled, nor normalized. A row without a vector is zero.
        present: ``[n]``, which rows have a vector of this width.
    """

    ids: Sequence[str]
    fields: Sequence[Mapping[str, Any]]
    vectors: FloatArray
    present: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)


class ReadsRaw(Protocol):
    """The two requests of a driver."""

    def raw_fields(self) -> Sequence[VectorField]:
        """The fields of dense vectors."""

    def raw_pages(self, field: VectorField) -> Iterator[RawPage]:
        """Pages of all rows, with the vectors of one field."""


class RawRows:
    """The rows of a collection that need not be millpond's.

    Args:
        connection: The collection.
        driver: Its requests.
    """

    def __init__(self, connection: Connection, driver: ReadsRaw) -> None:
        self._connection = connection
        self._driver = driver

    def fields(self) -> list[VectorField]:
        """The fields of dense vectors, the widest first.

        Returns:
            A list, empty if the collection has none.

        Raises:
            SinkError: The database does not answer, or its sink cannot read what others wrote.
        """
        found = self._connection.request("a look at its vectors", self._driver.raw_fields)
        return sorted(found, key=lambda field: -field.width)

    def pages(self, field: VectorField) -> Iterator[RawPage]:
        """Every row once, a page at a time.

        Args:
            field: The vectors to read.

        Returns:
            An iterator of pages, in an order that stays while nothing is written.

        Raises:
            SinkError: The database does not answer.
        """
        pages = self._driver.raw_pages(field)
        while (page := self._connection.request("a scan", lambda: next(pages, None))) is not None:
            yield page


def stacked(vectors: Sequence[Any], width: int) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Vectors of a page as ``[n, width]``, and which of them are there: not ``None``, and of this width.

    Args:
        vectors: ``n`` vectors, or ``None``.
        width: Their width.

    Returns:
        The matrix, zero where there is none, and ``[n]`` bool.
    """
    present = np.array([vector is not None and len(vector) == width for vector in vectors], dtype=np.bool_)
    if present.all() and len(vectors):
        return np.asarray(vectors, dtype=np.float32), present
    matrix = np.zeros((len(vectors), width), dtype=np.float32)
    for index in np.flatnonzero(present).tolist():
        matrix[index] = vectors[index]
    return matrix, present
