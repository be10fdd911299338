"""MaxSim: the sum over the query's tokens of the best similarity to a document token.

``score(q, d) = sum over i of max over j of q_i . d_j`` (Khattab and Zaharia, ColBERT, 2020, equation 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from millpond.errors import InvalidRequestError
from millpond.ragged import Ragged

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

# Token similarities computed at a time: 2 MiB of float32 stay in a core's cache between the product and the maximum.
_BLOCK = 1 << 19
# Query tokens compared at a time.
_QUERY_TOKENS = 256


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

    The function needs a few MiB besides its result, for any lengths; with ``top_k`` it never holds all scores.

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
            scores[:, start:stop] = block.numpy()
        return scores
    if type(top_k) is not int or top_k < 1:  # not a bool either
        raise InvalidRequestError(f"top_k={top_k!r} must be an int from 1; leave it out for all scores")
    best = torch.empty(len(queries), 0)  # [q, k]
    indices = torch.empty(len(queries), 0, dtype=torch.int64)  # [q, k]
    for start, stop, block in _blocks(queries, documents):
        # A stable sort with the earlier documents first: of equal scores the lower index stays first.
        best, order = torch.cat((best, block), dim=1).sort(dim=1, descending=True, stable=True)
        block_indices = torch.arange(start, stop).expand(len(queries), -1)
        best = best[:, :top_k].clone()  # a view would keep the whole block in memory
        indices = torch.cat((indices, block_indices), dim=1).gather(1, order[:, :top_k])
    return best.numpy(), indices.numpy()


def _blocks(queries: Ragged, documents: Ragged) -> Iterator[tuple[int, int, torch.Tensor]]:
    """``(start, stop, scores [q, stop - start])`` over runs of whole documents, in order."""
    tall = min(max(len(queries.flat), 1), _QUERY_TOKENS)
    rows = max(1, _BLOCK // max(tall, len(queries)))  # most document tokens, and most documents, in a block
    offsets = documents.offsets
    start = 0
    while start < len(documents):
        fits = int(np.searchsorted(offsets, offsets[start] + rows, side="right")) - 1
        stop = max(start + 1, min(fits, start + rows))
        yield start, stop, _score(queries, documents, start, stop, rows)
        start = stop


def _score(queries: Ragged, documents: Ragged, start: int, stop: int, rows: int) -> torch.Tensor:
    """Scores ``[q, stop - start]`` of a run of documents; a single one may be longer than ``rows`` tokens."""
    first, last = int(documents.offsets[start]), int(documents.offsets[stop])
    document_of = torch.repeat_interleave(torch.from_numpy(documents.lengths[start:stop]))  # [tokens]
    query_of = torch.repeat_interleave(torch.from_numpy(queries.lengths))  # [query tokens]
    scores = torch.zeros(len(queries), stop - start)
    for begin in range(0, len(queries.flat), _QUERY_TOKENS):
        query_rows = slice(begin, begin + _QUERY_TOKENS)
        query_tokens = _matrix(queries.flat[query_rows])  # [query tokens, d]
        best = torch.full((stop - start, len(query_tokens)), -torch.inf)
        for row in range(first, last, rows):
            document_rows = slice(row, min(row + rows, last))
            similarities = _matrix(documents.flat[document_rows]) @ query_tokens.T  # [tokens, query tokens]
            documents_of_rows = document_of[document_rows.start - first : document_rows.stop - first, None]
            best.scatter_reduce_(0, documents_of_rows.expand_as(similarities), similarities, "amax")
        scores.index_add_(0, query_of[query_rows], best.T)
    return scores


def _matrix(rows: npt.NDArray[Any]) -> torch.Tensor:
    """Rows as a float32 tensor, copied only if torch cannot use their memory (read-only, for example)."""
    return torch.from_numpy(np.require(rows, dtype=np.float32, requirements=["C", "W"]))
