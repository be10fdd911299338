"""A collection in memory, as a sink shows one that somebody else made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from millpond.ingest.sinks.raw_rows import RawPage, VectorField


class MemoryCollection:
    """Rows with one vector each, or none, as the sink of an audit."""

    collection = "docs"

    def __init__(
        self, vectors: np.ndarray, fields: Sequence[Mapping[str, Any]], *, page: int = 64, absent: Iterable[int] = ()
    ) -> None:
        self._vectors, self._rows, self._page = np.asarray(vectors, dtype=np.float32), fields, page
        self._absent = set(absent)

    def describe(self) -> Any:
        return SimpleNamespace(manifest=None, rows=len(self._vectors))

    def raw(self) -> MemoryCollection:
        return self

    def fields(self) -> list[VectorField]:
        return [VectorField(name="", width=self._vectors.shape[1])]

    def pages(self, field: VectorField) -> Iterator[RawPage]:
        for start in range(0, len(self._vectors), self._page):
            part = slice(start, start + self._page)
            rows = self._vectors[part]
            yield RawPage(
                ids=[str(number) for number in range(len(self._vectors))[part]],
                fields=self._rows[part],
                vectors=rows,
                present=np.array([start + place not in self._absent for place in range(len(rows))], dtype=np.bool_),
            )
