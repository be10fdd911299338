"""MillpondSparseEncoder: retrieval by weights of vocabulary entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.mteb.search import CorpusSearch
from millpond.tasks import Role


class MillpondSparseEncoder(CorpusSearch):
    """A SPLADE checkpoint, BGE-M3's sparse weights, or CSR: exact search by the dot product.

    It serves tasks of retrieval and reranking, and no others.
    """

    task = "sparse_embed"
    model_type = "sparse"

    def _encode(self, texts: list[str], role: Role, *, show_progress: bool) -> Any:
        rows = self.engine.sparse_embed(texts, role=role, show_progress=show_progress).embeddings
        return _matrix(rows)

    def _select(self, encoded: Any, indices: Sequence[int]) -> Any:
        return encoded[indices]

    def _scores(self, queries: Any, documents: Any) -> npt.NDArray[np.float32]:
        width = max(queries.shape[1], documents.shape[1])
        left, right = (_widened(matrix, width) for matrix in (queries, documents))
        products: npt.NDArray[np.float32] = (left @ right.T).toarray()
        return products


def _matrix(rows: Sequence[Mapping[int, float]]) -> Any:
    """``[n, largest id + 1]`` in compressed rows."""
    from scipy.sparse import csr_array

    columns = np.fromiter((token for row in rows for token in row), dtype=np.int64)
    weights = np.fromiter((weight for row in rows for weight in row.values()), dtype=np.float32)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return csr_array((weights, columns, offsets), shape=(len(rows), int(columns.max(initial=-1)) + 1))


def _widened(matrix: Any, width: int) -> Any:
    """The same entries in more columns."""
    from scipy.sparse import csr_array

    return csr_array((matrix.data, matrix.indices, matrix.indptr), shape=(matrix.shape[0], width))
