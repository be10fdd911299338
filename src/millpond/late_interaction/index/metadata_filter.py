"""Filters on metadata, evaluated in this process: documents are found by value once a key was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.support.metadata import Scalar


class MetadataTable:
    """The metadata of ``count`` documents that never change, by key and value.

    ``read`` gives it in order. It is called when a filter names a key for the first time; after that a filter costs
    one look-up for each value.
    """

    def __init__(self, count: int, read: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._count = count
        self._read = read
        self._documents: dict[str, dict[tuple[bool, Scalar], npt.NDArray[np.int64]]] = {}

    def mask(self, conditions: Mapping[str, Sequence[Scalar]]) -> npt.NDArray[np.bool_]:
        """bool ``[count]``: which documents have, for every key, one of its values; a stored list has its elements.

        The conditions are those of :func:`millpond.support.metadata.check_filter`. A bool equals no number.
        """
        mask = np.ones(self._count, dtype=np.bool_)
        for key, values in conditions.items():
            by_value = self._by_value(key)
            matching = np.zeros(self._count, dtype=np.bool_)
            for value in values:
                documents = by_value.get((isinstance(value, bool), value))
                if documents is not None:
                    matching[documents] = True
            mask &= matching
        return mask

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
