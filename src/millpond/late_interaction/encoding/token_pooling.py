"""Token pooling: documents with fewer rows, each the mean of tokens that are alike (Clavié et al., 2024, 2409.14683).

Hierarchical clustering with Ward's linkage over the cosine distances of a document's tokens, cut at a number of
clusters.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millpond.errors import InvalidRequestError
from millpond.late_interaction.encoding.ward import ward_clusters
from millpond.vectors import matryoshka
from millpond.vectors.ragged import Ragged

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

# Longer documents are clustered in runs of at most this many rows: a run of n rows takes 8 n^2 bytes, here 512 MiB.
_LONGEST = 1 << 13


def pool_tokens(documents: Ragged, factor: float, *, protected: int = 1) -> Ragged:
    """Replace each document's rows by the means of clusters of them, L2-normalized.

    The rows after the protected ones, ``m`` of them, become ``max(m // factor, 1)`` clusters, in the order of their
    first tokens. There are fewer if merges of equal height lie at the cut, as among equal rows. This is what
    sentence-transformers' ``HierarchicalTokenPooling`` computes.

    A document of ``n`` rows takes ``8 n^2`` bytes; one of more than 8,192 rows is clustered in runs of that many.

    Args:
        documents: Matrices ``[tokens, d]``; their rows are compared by cosine.
        factor: How many tokens become one, from 1; it need not be whole. 1 leaves the documents as they are.
        protected: Leading rows of each document that are kept as they are: a special token, usually.

    Returns:
        Matrices ``[rows, d]``: float32, or for ``factor=1`` ``documents`` itself.

    Raises:
        TypeError: ``documents`` is not a Ragged.
        InvalidRequestError: ``factor`` is not a finite number from 1, ``protected`` is not an int from 0, or a row is
            not finite.
    """
    if _check(documents, factor, protected) == 1:
        return documents
    rows, offsets = pooled_rows(documents, factor, protected=protected)
    flat = np.asarray(documents.flat, dtype=np.float32)
    sums = torch.zeros(int(offsets[-1]), flat.shape[1])
    index = torch.from_numpy(rows)[:, None].expand(-1, flat.shape[1])
    sums.scatter_add_(0, index, torch.from_numpy(np.require(flat, requirements=["C", "W"])))
    pooled = matryoshka.cut(sums.numpy(), flat.shape[1], normalize=True, own=True)
    kept = _leading(documents, protected)
    pooled[rows[kept]] = flat[kept]
    return Ragged(flat=pooled, offsets=offsets)


def pooled_rows(documents: Ragged, factor: float, *, protected: int = 1) -> tuple[IndexArray, IndexArray]:
    """Which row of ``pool_tokens(...).flat`` each row of ``documents.flat`` becomes a part of.

    Args:
        documents: As :func:`pool_tokens`.
        factor: As :func:`pool_tokens`.
        protected: As :func:`pool_tokens`.

    Returns:
        int64 ``[tokens of all documents]``, and the offsets ``[n + 1]`` of the pooled documents. Errors as
        :func:`pool_tokens`.
    """
    factor = _check(documents, factor, protected)
    total = len(documents.flat)
    first = np.arange(total, dtype=np.int64)  # [total] the first token of each token's cluster
    if factor > 1:
        flat = np.asarray(documents.flat, dtype=np.float32)
        if not np.isfinite(flat).all():
            row = int(np.flatnonzero(~np.isfinite(flat).all(axis=1))[0])
            document = int(np.searchsorted(documents.offsets, row, side="right")) - 1
            raise InvalidRequestError(f"a row of document {document} is not finite; its tokens cannot be compared")
        units = matryoshka.cut(flat, flat.shape[1], normalize=True)
        starts, lengths = _runs(documents, protected)
        ward_clusters(units, starts, lengths, np.maximum((lengths // factor).astype(np.int64), 1), first)
    heads = first == np.arange(total)
    counts = np.concatenate(([0], np.cumsum(heads)))  # [total + 1] clusters before each token
    return (counts[1:] - 1)[first], counts[documents.offsets]


def _check(documents: Any, factor: Any, protected: Any) -> float:
    if not isinstance(documents, Ragged):
        raise TypeError(
            f"documents is of type {type(documents).__name__}; pass a Ragged, as token_embed(...).embeddings is "
            "(or build one with Ragged.from_matrices)"
        )
    if isinstance(factor, bool) or not isinstance(factor, Real) or not 1 <= float(factor) < math.inf:
        raise InvalidRequestError(f"factor={factor!r} must be a finite number from 1; 2 halves the number of rows")
    if isinstance(protected, bool) or not isinstance(protected, int | np.integer) or protected < 0:
        raise InvalidRequestError(f"protected={protected!r} must be an int from 0: the leading rows that are kept")
    return float(factor)


def _leading(documents: Ragged, protected: int) -> IndexArray:
    """Indices in ``flat`` of the first ``protected`` rows of each document."""
    lengths = np.minimum(documents.lengths, protected)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    leading: IndexArray = np.repeat(documents.offsets[:-1], lengths) + within
    return leading


def _runs(documents: Ragged, protected: int) -> tuple[IndexArray, IndexArray]:
    """Starts and lengths of the runs of rows that are clustered: the unprotected rows, at most ``_LONGEST`` of them."""
    begins = np.minimum(documents.offsets[:-1] + protected, documents.offsets[1:])
    counts = documents.offsets[1:] - begins  # [n]
    pieces = -(-counts // _LONGEST)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a run in its document
    starts = np.repeat(begins, pieces) + number * _LONGEST
    lengths = np.minimum(np.repeat(counts, pieces) - number * _LONGEST, _LONGEST)
    return starts[lengths > 1], lengths[lengths > 1]
