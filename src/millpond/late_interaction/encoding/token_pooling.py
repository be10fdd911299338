"""Token pooling: documents with fewer rows, each the mean of tokens that are alike (Clavié et al., 2024, 2409.14683).

Hierarchical clustering with Ward's linkage over the cosine distances of a document's tokens, cut at a number of
clusters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.encoding.row_sums import row_sums
from millpond.late_interaction.encoding.ward import ward_clusters
from millpond.vectors import matryoshka
from millpond.vectors.ragged import Ragged

IndexArray = npt.NDArray[np.int64]

# Longer documents are clustered in runs of at most this many rows: a run of n rows takes 8 n^2 bytes, here 512 MiB.
_LONGEST = 1 << 13


def pool_tokens(documents: Ragged, factor: int) -> Ragged:
    """Replace each document's rows by the means of clusters of them, float32 of length 1.

    The first row, a special token, is kept; the ``m`` others become ``max(m // factor, 1)`` clusters, in the order of
    their first tokens. There are fewer if merges of equal height lie at the cut, as among equal rows. This is what
    sentence-transformers' ``HierarchicalTokenPooling`` computes. With a factor of 1 the documents stay as they are.
    """
    if factor == 1:
        return documents
    rows, offsets = pooled_rows(documents, factor)
    flat = np.asarray(documents.flat, dtype=np.float32)
    sums = row_sums(flat, rows, int(offsets[-1]))
    pooled = matryoshka.cut(sums, flat.shape[1], normalize=True, own=True)
    kept = documents.offsets[:-1][documents.lengths > 0]
    pooled[rows[kept]] = flat[kept]
    return Ragged(flat=pooled, offsets=offsets)


def pooled_rows(documents: Ragged, factor: int) -> tuple[IndexArray, IndexArray]:
    """Which row of ``pool_tokens(...).flat`` each row of ``documents.flat`` becomes a part of.

    Returns:
        int64 ``[tokens of all documents]``, and the offsets ``[n + 1]`` of the pooled documents.
    """
    total = len(documents.flat)
    first = np.arange(total, dtype=np.int64)  # [total] the first token of each token's cluster
    if factor > 1:
        flat = np.asarray(documents.flat, dtype=np.float32)
        units = matryoshka.cut(flat, flat.shape[1], normalize=True)
        starts, lengths = _runs(documents)
        ward_clusters(units, starts, lengths, np.maximum(lengths // factor, 1), first)
    heads = first == np.arange(total)
    counts = np.concatenate(([0], np.cumsum(heads)))  # [total + 1] clusters before each token
    return (counts[1:] - 1)[first], counts[documents.offsets]


def _runs(documents: Ragged) -> tuple[IndexArray, IndexArray]:
    """Starts and lengths of the runs of rows that are clustered: all but each first one, at most ``_LONGEST``."""
    begins = np.minimum(documents.offsets[:-1] + 1, documents.offsets[1:])
    counts = documents.offsets[1:] - begins  # [n]
    pieces = -(-counts // _LONGEST)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a run in its document
    starts = np.repeat(begins, pieces) + number * _LONGEST
    lengths = np.minimum(np.repeat(counts, pieces) - number * _LONGEST, _LONGEST)
    return starts[lengths > 1], lengths[lengths > 1]
