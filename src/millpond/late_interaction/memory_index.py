"""MemoryIndex: token matrices in this process, compared exactly."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from millpond.late_interaction.index import Documents, Hit, IndexStats, LateInteractionIndex, SearchOptions
from millpond.late_interaction.index_arguments import TokenEngine
from millpond.late_interaction.metadata_filter import MetadataTable
from millpond.late_interaction.similarity import maxsim
from millpond.metadata import Scalar
from millpond.ragged import Ragged

Codec = Literal["int8", "bfloat16", "float32"]


class MemoryIndex(LateInteractionIndex):
    """Token matrices in memory, compared exactly.

    Args:
        engine: As :class:`LateInteractionIndex`.
        codec: How rows are stored.
        width: As :class:`LateInteractionIndex`.
        pool_factor: As :class:`LateInteractionIndex`.
    """

    def __init__(
        self,
        engine: TokenEngine | None,
        codec: Codec = "int8",
        *,
        width: int | None = None,
        pool_factor: int | None = None,
    ) -> None:
        super().__init__(engine, width=width, pool_factor=pool_factor)
        self._codec = codec
        self._documents: dict[str, tuple[str, Mapping[str, Any], Any]] = {}
        self._lock = threading.Lock()

    def stats(self) -> IndexStats:
        """The size of the index."""
        self._check_open()
        matrices = [matrix for _, _, matrix in self._documents.values()]
        return IndexStats(
            documents=len(matrices),
            tokens=sum(map(len, matrices)),
            width=matrices[0].shape[1] if matrices else 0,
            codec=self._codec,
            bytes=sum(matrix.nbytes for matrix in matrices),
        )

    def __len__(self) -> int:
        self._check_open()
        return len(self._documents)

    def _upsert(self, documents: Documents) -> int:
        with self._lock:
            new = sum(id not in self._documents for id in documents.ids)
            for id, text, metadata, matrix in zip(
                documents.ids, documents.texts, documents.metadata, documents.embeddings, strict=True
            ):
                self._documents[id] = (text, metadata, matrix.copy())
            return new

    def _delete(self, ids: Sequence[str]) -> int:
        with self._lock:
            return sum(self._documents.pop(id, None) is not None for id in ids)

    def _delete_matching(self, conditions: Mapping[str, Sequence[Scalar]]) -> int:
        ids = list(self._documents)
        mask = MetadataTable([self._documents[id][1] for id in ids]).mask(conditions)
        return self._delete([id for id, matches in zip(ids, mask, strict=True) if matches])

    def _search(self, queries: Ragged, search: SearchOptions) -> list[list[Hit]]:
        documents = dict(self._documents)
        ids = list(documents)
        mask = MetadataTable([documents[id][1] for id in ids]).mask(search.conditions)
        if search.ids is not None:
            mask &= np.isin(np.array(ids, dtype=object), np.array(search.ids, dtype=object))
        mask &= np.array([len(documents[id][2]) > 0 for id in ids], dtype=np.bool_)
        ids = [id for id, matches in zip(ids, mask, strict=True) if matches]
        if not ids:
            return [[] for _ in queries]
        matrices = Ragged.from_matrices([documents[id][2] for id in ids], width=queries.flat.shape[1])
        scores, indices = maxsim(queries, matrices, top_k=search.k)
        return [
            [
                Hit(
                    id=ids[i],
                    score=float(score),
                    exact=True,
                    text=documents[ids[i]][0],
                    metadata=copy.deepcopy(documents[ids[i]][1]),
                )
                for score, i in zip(scores[q], indices[q], strict=True)
            ]
            if len(queries[q])
            else []
            for q in range(len(queries))
        ]

    def _stored(self, id: str) -> tuple[str, Mapping[str, Any]] | None:
        stored = self._documents.get(id)
        return None if stored is None else stored[:2]

    def _ids(self) -> list[str]:
        return list(self._documents)
