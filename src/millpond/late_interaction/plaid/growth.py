"""Growth: the centroids that rows need which came after the training, and how many rows are far from theirs."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import isqrt

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs import kmeans
from millpond.late_interaction.codecs.residual import FAR_SHARE, Encoded, ResidualCodec, far_limit
from millpond.late_interaction.kernels.centroids import MAX_CENTROIDS, squared_distances
from millpond.late_interaction.plaid.segment import Segment
from millpond.late_interaction.plaid.snapshot import Snapshot

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]

# Rows whose distances are measured.
_MEASURED = 2_048
_LEAST_SAMPLE = 1 << 15
# The share of far rows above which searches miss documents. A tenth is what many small adds leave, without a loss.
_TOO_MANY = 20 * FAR_SHARE


def sample_count(rows: int, total: int) -> int:
    """How many of ``rows`` new rows :func:`grown` looks at, in an index of ``total`` rows."""
    wanted = kmeans.POINTS_PER_CENTROID * rows * isqrt(64 * total) // max(total, 1)
    return min(rows, max(wanted, _LEAST_SAMPLE))


def grown(trained: ResidualCodec, sample: FloatArray, *, rows: int, total: int) -> ResidualCodec:
    """The codec with the centroids that new rows need.

    Rows that are far from their centroids get as many further ones as so many rows have on the whole. If the index has
    fewer centroids than one training would choose, the farthest of the other rows get some too. Old codes stay valid.

    Args:
        trained: The codec; it has a limit.
        sample: Some of the new rows, ``[n, d]``, in random order.
        rows: New rows.
        total: Rows of the index, these included.
    """
    if trained.limits is None or not len(sample):
        return trained
    distances = trained.distances(sample)
    goal, have = min(isqrt(64 * total), MAX_CENTROIDS), len(trained.centroids)
    share = rows * goal / total  # centroids that these rows would have of one training
    far = float((distances > trained.limits[0]).mean())
    wanted = round(max(far * share, min(share, goal - have)))
    added = min(wanted, MAX_CENTROIDS - have)
    if added > 0:
        farthest = np.argsort(-distances, kind="stable")[: max(added, round(len(sample) * wanted / share))]
        trained = trained.extended(kmeans.train(sample[np.sort(farthest)], added))
    if added < wanted and far > _TOO_MANY:
        logger.warning(
            "%.0f %% of %d new token rows are far from all centroids, and an index has at most %d: searches may miss "
            "their documents; keep more candidates, or put these documents into another index",
            100 * far,
            rows,
            MAX_CENTROIDS,
        )
    return trained


def with_limit(snapshot: Snapshot) -> ResidualCodec | None:
    """The codec; of an index without a limit it is that of its oldest rows, which the centroids were trained on."""
    trained = snapshot.trained
    if trained is None or trained.limits is not None:
        return trained
    limit = far_limit(_distances(snapshot, trained, snapshot.manifest.trained_tokens))
    return replace(trained, limits=(limit, limit))


def drift(snapshot: Snapshot) -> float:
    """The share of coded rows that are far from their centroids; about 0.01 where all rows are as those of training.

    0 of so few rows that it says nothing.
    """
    trained = with_limit(snapshot)
    if trained is None or trained.limits is None:
        return 0.0
    distances = _distances(snapshot, trained, snapshot.manifest.tokens)
    return float((distances > trained.limits[1]).mean()) if len(distances) >= _MEASURED else 0.0


def is_drifted(snapshot: Snapshot) -> bool:
    """Whether so many rows are far from their centroids that searches miss documents."""
    return drift(snapshot) > _TOO_MANY


def _distances(snapshot: Snapshot, trained: ResidualCodec, first: int) -> FloatArray:
    """Squared distances of some of the first coded rows of an index from their centroids."""
    coded = [segment for segment in snapshot.segments if segment.entry.coded]
    ends = np.cumsum([segment.entry.tokens for segment in coded], dtype=np.int64)
    count = min(first, int(ends[-1]) if len(ends) else 0)
    chosen = np.unique(np.linspace(0, count - 1, min(count, _MEASURED)).astype(np.int64))
    parts = np.split(chosen, np.searchsorted(chosen, ends[:-1])) if coded else []
    starts = [int(end) - segment.entry.tokens for end, segment in zip(ends, coded, strict=True)]
    found = [_of_segment(snapshot, trained, *each) for each in zip(coded, parts, starts, strict=True)]
    return np.concatenate(found) if found else np.empty(0, dtype=np.float32)


def _of_segment(
    snapshot: Snapshot, trained: ResidualCodec, segment: Segment, positions: npt.NDArray[np.int64], start: int
) -> FloatArray:
    columns, rows = segment.file.tokens(len(trained.centroids)), positions - start
    assert columns.codes is not None
    codes, scales = columns.codes[rows], None if columns.scales is None else columns.scales[rows]
    if columns.residuals is not None:
        assert scales is not None
        return trained.stored_distances(Encoded(codes=codes, scales=scales, residuals=columns.residuals[rows]))
    assert columns.rows is not None
    unpacked = snapshot.manifest.row_codec.unpack(columns.rows[rows], scales, trained.dim)
    return squared_distances(unpacked, trained.centroids, codes)
