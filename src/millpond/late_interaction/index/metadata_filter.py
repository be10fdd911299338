"""Filters on metadata, evaluated in this process: documents are found by value once a key was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.support.metadata import Scalar


class MetadataTable:
    """The metadata of documents that never change, by key and value.

    A key is read when a filter names it for the first time; after that a filter costs one look-up for each value.
    """

    def __init__(self, metadata: Sequence[Mapping[str, Any]]) -> None:
        """Over the metadata of each document; kept, not copied."""
        self._metadata = metadata
        self._documents: dict[str, dict[tuple[bool, Scalar], npt.NDArray[np.int64]]] = {}

    def mask(self, conditions: Mapping[str, Sequence[Scalar]]) -> npt.NDArray[np.bool_]:
        """Which documents have, for every key, one of its values; a stored list has each of its elements.

        A bool equals no number.

        Args:
            conditions: As :func:`millpond.support.metadata.check_filter` returns them.

        Returns:
            bool ``[documents]``.
        """
        mask = np.ones(len(self._metadata), dtype=np.bool_)
        for key, values in conditions.items():
            by_value = self._by_value(key)
            matching = np.zeros(len(self._metadata), dtype=np.bool_)
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
            for index, metadata in enumerate(self._metadata):
                if key in metadata:
                    stored = metadata[key]
                    for value in stored if isinstance(stored, list) else (stored,):
                        if isinstance(value, str | bool | int | float):
                            documents.setdefault((isinstance(value, bool), value), []).append(index)
            found = {value: np.array(indices, dtype=np.int64) for value, indices in documents.items()}
            self._documents[key] = found
        return found
