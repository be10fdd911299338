"""Compaction: which segments are to become one, and when centroids are trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from millpond.late_interaction.plaid.storage.manifest import Manifest, SegmentEntry

# Up to here a scan of whole rows takes no longer than one of codes, and centroids of fewer rows would be worse ones.
TRAIN_TOKENS = 1 << 17
# Centroids of half of the rows are fewer than there should be.
OUTGROWN = 2
# Rows that come after the training stay as they are, and are all compared, until they are a 32nd of those that train
# the first centroids, or this share of all: so many show where centroids are missing.
_UNCODED_PART, _UNCODED_SHARE = 32, 1 / 64
# Segments of one size that become one.
_FANOUT = 8
# Segments of fewer rows than this are all of one size; above it, a size spans a factor of _FANOUT.
_SMALLEST_TIER = 1 << 12
# Rows that an add rewrites at most, on top of its own: a fraction of a second. More is left to compact().
_AUTOMATIC_TOKENS = 1 << 20
_DEAD_SHARE = 0.2


def is_trainable(manifest: Manifest) -> bool:
    """Whether there are enough rows for the first centroids."""
    return manifest.codec is None and manifest.tokens >= TRAIN_TOKENS


def is_outgrown(manifest: Manifest) -> bool:
    """Whether there are too many rows for the centroids, and the rows to train better ones on.

    Residuals are not the rows any more: encoding them anew would add one error to the other.
    """
    trained = manifest.codec is not None and not manifest.row_codec.bits
    return trained and manifest.tokens >= OUTGROWN * max(manifest.trained_tokens, 1)


def is_codable(manifest: Manifest, tokens: int) -> bool:
    """Whether there are centroids, and so many rows without codes are enough to add the centroids that they need."""
    least = max(TRAIN_TOKENS // _UNCODED_PART, int(manifest.tokens * _UNCODED_SHARE), 1)
    return manifest.codec is not None and tokens >= min(least, _AUTOMATIC_TOKENS)


def uncoded_runs(manifest: Manifest) -> list[range]:
    """Neighbouring segments without codes, once there are enough rows in all of them; else none."""
    runs = [run for run in _runs(manifest.segments) if not manifest.segments[run.start].coded]
    tokens = sum(segment.live_tokens for segment in manifest.segments if not segment.coded)
    return runs if is_codable(manifest, tokens) else []


def is_compact(manifest: Manifest) -> bool:
    """Whether compaction has nothing to do."""
    segments = manifest.segments
    coded = manifest.codec is not None
    whole = len(segments) <= 1 and not any(segment.deleted_documents or segment.coded != coded for segment in segments)
    return whole and not is_trainable(manifest) and not is_outgrown(manifest)


def due_segments(manifest: Manifest) -> range | None:
    """Neighbouring segments that an add should make one; ``None`` if there are none.

    These are eight of one size with the smaller ones between them, or one with more than 20 % of its documents deleted.
    Neighbours only, so that documents stay in the order in which they were added; all with codes, or all without. A row
    is rewritten once for each size that its segment grows through.
    """
    segments = manifest.segments
    tiers = [_tier(segment) for segment in segments]
    for tier in sorted(set(tiers)):
        for (is_smaller, _), group in groupby(
            range(len(segments)), key=lambda index: (tiers[index] <= tier, segments[index].coded)
        ):
            run = list(group)
            of_tier = sum(tiers[index] == tier for index in run)
            if is_smaller and of_tier >= _FANOUT and _is_small([segments[index] for index in run]):
                return range(run[0], run[-1] + 1)
    for index, segment in enumerate(segments):
        if segment.deleted_documents > _DEAD_SHARE * segment.documents and _is_small([segment]):
            return range(index, index + 1)
    return None


def _runs(segments: Sequence[SegmentEntry]) -> list[range]:
    """Neighbouring segments that all have codes, or all have none."""
    groups = [list(group) for _, group in groupby(range(len(segments)), key=lambda index: segments[index].coded)]
    return [range(group[0], group[-1] + 1) for group in groups]


def _is_small(segments: list[SegmentEntry]) -> bool:
    return sum(segment.live_tokens for segment in segments) <= _AUTOMATIC_TOKENS


def _tier(segment: SegmentEntry) -> int:
    tier, size = 0, _SMALLEST_TIER
    while segment.live_tokens > size:
        tier, size = tier + 1, size * _FANOUT
    return tier
