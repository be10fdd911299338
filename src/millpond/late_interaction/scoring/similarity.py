"""MaxSim: the sum over the query's tokens of the best similarity to a document token.

``score(q, d) = sum over i of max over j of q_i . d_j`` (Khattab and Zaharia, ColBERT, 2020, equation 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.late_interaction.codecs.rows import FLOAT32
from millpond.late_interaction.kernels.scan import best_first
from millpond.late_interaction.scoring.exact import Tokens, score
from millpond.vectors.ragged import Ragged, runs

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

# Scores computed at a time, and numbers of documents that are converted to float32 at a time: 4 MiB.
_BLOCK = 1 << 20


@overload
def maxsim(queries: Ragged, documents: Ragged, *, top_k: None = None) -> FloatArray: ...
@overload
def maxsim(queries: Ragged, documents: Ragged, *, top_k: int) -> tuple[FloatArray, IndexArray]: ...
def maxsim(
    queries: Ragged, documents: Ragged, *, top_k: int | None = None
) -> FloatArray | tuple[FloatArray, IndexArray]:
    """Score every document for every query, exactly, in float32.

    The maximum runs over the document's own tokens only: there is no padding, so no implicit zero, and a score may be
    negative. A document without tokens scores ``-inf``, which ranks it last; a query without tokens scores 0.

    The function needs a copy of the queries and a few MiB besides its result, for any lengths; with ``top_k`` it never
    holds all scores. It uses as many threads as torch does where it is imported, else
    ``OMP_NUM_THREADS`` or the processor's cores, each for a part of the documents.

    Args:
        queries: ``q`` matrices ``[tokens, d]``; normalize the rows for cosine.
        documents: ``n`` matrices ``[tokens, d]``.
        top_k: Return the best documents of each query instead of all scores.

    Returns:
        ``[q, n]`` scores. With ``top_k``: scores ``[q, k]``, best first, and the documents' indices ``[q, k]`` int64,
        where ``k`` is at most ``n``; of equal scores the lower index comes first.

    Raises:
        TypeError: An argument is not a Ragged.
        InvalidRequestError: The widths differ, or ``top_k`` is not a positive int.
    """
    for name, value in (("queries", queries), ("documents", documents)):
        if not isinstance(value, Ragged):
            raise TypeError(
                f"{name} is of type {type(value).__name__}; pass a Ragged, as token_embed(...).embeddings is "
                "(or build one with Ragged.from_matrices)"
            )
    if queries.flat.shape[1] != documents.flat.shape[1]:
        raise InvalidRequestError(
            f"queries are {queries.flat.shape[1]} wide and documents {documents.flat.shape[1]}; "
            "both must come from one model, cut to one width"
        )
    if top_k is None:
        scores = np.empty((len(queries), len(documents)), dtype=np.float32)
        for start, stop, block in _blocks(queries, documents):
            scores[:, start:stop] = block
        return scores
    if type(top_k) is not int or top_k < 1:  # not a bool either
        raise InvalidRequestError(f"top_k={top_k!r} must be an int from 1; leave it out for all scores")
    return _best(queries, documents, top_k)


def _best(queries: Ragged, documents: Ragged, top_k: int) -> tuple[FloatArray, IndexArray]:
    """The best documents of each query, and their scores."""
    best = np.empty((len(queries), 0), dtype=np.float32)  # [q, k]
    indices = np.empty((len(queries), 0), dtype=np.int64)  # [q, k]
    for start, stop, block in _blocks(queries, documents):
        # The earlier documents first: of equal scores the lower index stays first.
        scores = np.concatenate((best, block), axis=1)
        known = np.concatenate((indices, np.broadcast_to(np.arange(start, stop), block.shape)), axis=1)
        unordered = np.isnan(scores)
        keys = np.where(unordered, np.float32(np.inf), scores) if unordered.any() else scores  # NaN first
        order = np.array([best_first(row, top_k) for row in keys], dtype=np.int64)
        order = order.reshape(len(queries), min(top_k, scores.shape[1]))
        best, indices = np.take_along_axis(scores, order, axis=1), np.take_along_axis(known, order, axis=1)
    return best, indices


def _blocks(queries: Ragged, documents: Ragged) -> Iterator[tuple[int, int, FloatArray]]:
    """``(start, stop, scores [q, stop - start])`` over runs of whole documents, in order."""
    most_documents = max(1, _BLOCK // max(1, len(queries)))
    total, width = documents.flat.shape
    most_rows = max(1, total if _readable(documents.flat) else _BLOCK // max(1, width))
    for start, stop in runs(documents.offsets, most_rows, most_documents):
        yield start, stop, score(queries, _tokens(documents, start, stop))


def _tokens(documents: Ragged, start: int, stop: int) -> Tokens:
    """A run of documents; its rows are copied only if they are no float32, or have gaps between their columns."""
    offsets = documents.offsets[start : stop + 1]
    rows = documents.flat[offsets[0] : offsets[-1]]
    if not _readable(rows):
        rows = np.require(rows, dtype=np.float32, requirements="C")
    return Tokens(codec=FLOAT32, rows=rows, scales=None, offsets=offsets - offsets[0])


def _readable(rows: npt.NDArray[np.generic]) -> bool:
    """Whether the kernels can read the rows where they are."""
    return rows.dtype == np.float32 and rows.strides[1] == rows.itemsize and rows.strides[0] > 0
