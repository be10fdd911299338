"""Filters on metadata, evaluated in this process: documents are found by value or range once a key was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.support.filters import Condition, Range
from millpond.support.metadata import Scalar


class MetadataTable:
    """The metadata of ``count`` documents that never change, by key and value.

    ``read`` gives it in order. It is called when a filter names a key for the first time; after that a filter costs
    one look-up for each value, and two for a range.
    """

    def __init__(self, count: int, read: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._count = count
        self._read = read
        self._documents: dict[str, dict[tuple[bool, Scalar], npt.NDArray[np.int64]]] = {}
        self._sorted: dict[tuple[str, bool], _Sorted] = {}

    def mask(self, conditions: Mapping[str, Condition]) -> npt.NDArray[np.bool_]:
        """bool ``[count]``: which documents have, for every key, one of its values or one in its range.

        The conditions are those of :func:`millpond.support.filters.check_filter`. A stored list has its elements, and a
        bool equals no number.
        """
        mask = np.ones(self._count, dtype=np.bool_)
        for key, condition in conditions.items():
            matching = np.zeros(self._count, dtype=np.bool_)
            if isinstance(condition, Range):
                matching[self._in_order(key, condition).of(condition)] = True
            else:
                by_value = self._by_value(key)
                for value in condition:
                    documents = by_value.get((isinstance(value, bool), value))
                    if documents is not None:
                        matching[documents] = True
            mask &= matching
        return mask

    def _in_order(self, key: str, range: Range) -> _Sorted:
        """The documents of a key whose values have a place among the bounds of such a range, in order."""
        found = self._sorted.get((key, range.of_times))
        if found is None:
            by_value = self._by_value(key)
            placed = [(range.place(value[1]), documents) for value, documents in by_value.items()]
            placed = sorted((pair for pair in placed if pair[0] is not None), key=lambda pair: pair[0])
            ends = np.cumsum([0] + [len(documents) for _, documents in placed])
            documents = np.concatenate([np.zeros(0, dtype=np.int64), *(documents for _, documents in placed)])
            found = _Sorted([place for place, _ in placed], documents, ends)
            self._sorted[key, range.of_times] = found
        return found

    def _by_value(self, key: str) -> dict[tuple[bool, Scalar], npt.NDArray[np.int64]]:
        """The documents of each value of a key. Two threads may both read the metadata; either result is the same."""
        found = self._documents.get(key)
        if found is None:
            documents: dict[tuple[bool, Scalar], list[int]] = {}
            for index, metadata in enumerate(self._read()):
                stored = metadata.get(key)
                for value in stored if isinstance(stored, list) else (stored,):
                    if isinstance(value, str | bool | int | float):
                        documents.setdefault((isinstance(value, bool), value), []).append(index)
            found = {value: np.array(indices, dtype=np.int64) for value, indices in documents.items()}
            self._documents[key] = found
        return found


@dataclass(frozen=True)
class _Sorted:
    """Documents in the order of a key's values."""

    places: list[Any]
    documents: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]  # of each place's documents, after a 0

    def of(self, range: Range) -> npt.NDArray[np.int64]:
        """The documents of the values in a range."""
        among = range.among(self.places)
        return self.documents[self.ends[among.start] : self.ends[among.stop]]
