"""Compaction: which segments are to become one, and when centroids are trained."""

from __future__ import annotations

from itertools import groupby

from millpond.late_interaction.plaid.storage.manifest import Manifest, SegmentEntry

# Up to here a scan of whole rows takes no longer than one of codes, and centroids of fewer rows would be worse ones.
TRAIN_TOKENS = 1 << 17
# Centroids of an eighth of the rows are a third as many as there should be.
OUTGROWN = 8
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


def is_compact(manifest: Manifest) -> bool:
    """Whether compaction has nothing to do."""
    segments = manifest.segments
    whole = len(segments) <= 1 and not any(segment.deleted_documents for segment in segments)
    return whole and not is_trainable(manifest) and not is_outgrown(manifest)


def due_segments(manifest: Manifest) -> range | None:
    """Neighbouring segments that an add should make one; ``None`` if there are none.

    These are eight of one size with the smaller ones between them, or one with more than 20 % of its documents deleted.
    Neighbours only, so that documents stay in the order in which they were added. A row is rewritten once for each
    size that its segment grows through.
    """
    segments = manifest.segments
    tiers = [_tier(segment) for segment in segments]
    for tier in sorted(set(tiers)):
        for is_smaller, group in groupby(range(len(segments)), key=lambda index: tiers[index] <= tier):
            run = list(group)
            of_tier = sum(tiers[index] == tier for index in run)
            if is_smaller and of_tier >= _FANOUT and _is_small([segments[index] for index in run]):
                return range(run[0], run[-1] + 1)
    for index, segment in enumerate(segments):
        if segment.deleted_documents > _DEAD_SHARE * segment.documents and _is_small([segment]):
            return range(index, index + 1)
    return None


def _is_small(segments: list[SegmentEntry]) -> bool:
    return sum(segment.live_tokens for segment in segments) <= _AUTOMATIC_TOKENS


def _tier(segment: SegmentEntry) -> int:
    tier, size = 0, _SMALLEST_TIER
    while segment.live_tokens > size:
        tier, size = tier + 1, size * _FANOUT
    return tier
