"""Writer: what one commit changes. Each function writes files and returns the manifest to commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs import kmeans
from millpond.late_interaction.codecs.residual import ResidualCodec
from millpond.late_interaction.plaid import compaction, growth
from millpond.late_interaction.plaid.pending import PendingDocuments
from millpond.late_interaction.plaid.segment import Segment, bitmap
from millpond.late_interaction.plaid.segment_writer import Source, write_segment
from millpond.late_interaction.plaid.snapshot import Snapshot, write_arrays, write_trained
from millpond.late_interaction.plaid.storage.folder import Transaction
from millpond.late_interaction.plaid.storage.manifest import Manifest, SegmentEntry

_SEED = 0


def append(transaction: Transaction, snapshot: Snapshot, pending: PendingDocuments) -> Manifest:
    """Store documents in a new segment, and delete older ones of equal ids."""
    replaced = snapshot.find([id.decode() for id in pending.ids])
    manifest = delete(transaction, snapshot, [documents[documents >= 0] for documents in replaced])
    settings = pending.settings
    if settings is not None and manifest.settings is None:
        projection = None
        if settings.projection is not None:
            path = transaction.new_path("projection")
            write_arrays(path, {"matrix": settings.projection.matrix})
            projection = transaction.entry(path)
        manifest = replace(manifest, settings=settings.to_json(), projection=projection)
    sources, trained = [Source(columns=pending.columns())], None
    if compaction.is_codable(manifest, pending.tokens):
        manifest, trained = _grown(transaction, snapshot, manifest, sources)
    return replace(manifest, segments=(*manifest.segments, _write(transaction, manifest, sources, trained)))


def encode(transaction: Transaction, snapshot: Snapshot, runs: Sequence[range]) -> Manifest:
    """Make one segment with codes of each run of neighbours, with the centroids that their rows without codes need."""
    segments = [snapshot.segments[index] for run in runs for index in run]
    new = _sources([segment for segment in segments if not segment.entry.coded])
    manifest, trained = _grown(transaction, snapshot, snapshot.manifest, new)
    entries = list(manifest.segments)
    for run in reversed(runs):
        sources = _sources(snapshot.segments[run.start : run.stop])
        entries[run.start : run.stop] = [_write(transaction, manifest, sources, trained)]
    return replace(manifest, segments=tuple(entries))


def _grown(
    transaction: Transaction, snapshot: Snapshot, manifest: Manifest, sources: Sequence[Source]
) -> tuple[Manifest, ResidualCodec | None]:
    """The codec with the centroids that the rows of ``sources`` need, and the manifest that names its file."""
    trained = growth.with_limit(snapshot)
    rows = sum(int(source.offsets[-1]) for source in sources)
    if trained is None or not rows:
        return manifest, trained
    total = max(manifest.tokens, rows)
    sample = _sample(sources, manifest, growth.sample_count(rows, total))
    grown = growth.grown(trained, sample, rows=rows, total=total)
    if grown is trained:
        return manifest, trained
    path = transaction.new_path("codec")
    write_trained(path, grown)
    return replace(manifest, codec=transaction.entry(path)), grown


def delete(transaction: Transaction, snapshot: Snapshot, documents: Sequence[npt.NDArray[np.int64]]) -> Manifest:
    """Delete documents of each segment, live ones, by new bitmaps."""
    entries = [
        _with_deleted(transaction, segment, some) if len(some) else segment.entry
        for segment, some in zip(snapshot.segments, documents, strict=True)
    ]
    return replace(snapshot.manifest, segments=tuple(entries))


def merge(transaction: Transaction, snapshot: Snapshot, merged: range) -> Manifest:
    """Make one segment of neighbouring ones that all have codes or all have none, without deleted documents."""
    entries = list(snapshot.manifest.segments)
    sources = _sources(snapshot.segments[merged.start : merged.stop])
    trained = snapshot.trained if entries[merged.start].coded else None
    entries[merged.start : merged.stop] = [_write(transaction, snapshot.manifest, sources, trained)]
    return replace(snapshot.manifest, segments=tuple(entries))


def train(transaction: Transaction, snapshot: Snapshot) -> Manifest:
    """Train centroids on the rows of all segments, and make one segment of them with the new codes."""
    manifest = snapshot.manifest
    tokens = manifest.tokens
    sample = _sample(_sources(snapshot.segments), manifest, kmeans.sample_count(tokens))
    bits, k = manifest.row_codec.bits, kmeans.centroid_count(tokens)
    trained = ResidualCodec.train(sample, bits=bits, k=k, seed=_SEED)
    path = transaction.new_path("codec")
    write_trained(path, trained)
    entry = _write(transaction, manifest, _sources(snapshot.segments), trained, encode=True)
    return replace(manifest, codec=transaction.entry(path), trained_tokens=tokens, segments=(entry,))


def _sources(segments: Sequence[Segment]) -> list[Source]:
    return [Source(columns=segment.file.columns, live=segment.live) for segment in segments]


def _write(
    transaction: Transaction,
    manifest: Manifest,
    sources: Sequence[Source],
    trained: ResidualCodec | None,
    *,
    encode: bool = False,
) -> SegmentEntry:
    path = transaction.new_path("segment")
    documents, tokens = write_segment(
        path, sources, dim=_dim(manifest), codec=manifest.row_codec, trained=trained, encode=encode
    )
    return SegmentEntry(file=transaction.entry(path), documents=documents, tokens=tokens, coded=trained is not None)


def _dim(manifest: Manifest) -> int:
    return 0 if manifest.settings is None else int(manifest.settings["width"])


def _with_deleted(transaction: Transaction, segment: Segment, documents: npt.NDArray[np.int64]) -> SegmentEntry:
    entry = segment.entry
    live = np.ones(entry.documents, dtype=np.bool_) if segment.live is None else segment.live.copy()
    live[documents] = False
    offsets = segment.file.columns.offsets
    return replace(
        entry,
        deleted=transaction.write("deleted", bitmap(~live)) if live.any() else None,
        deleted_documents=entry.documents - int(np.count_nonzero(live)),
        deleted_tokens=entry.deleted_tokens + int((offsets[documents + 1] - offsets[documents]).sum()),
    )


def _sample(sources: Sequence[Source], manifest: Manifest, count: int) -> npt.NDArray[np.float32]:
    """Rows of the documents to copy drawn at random, float32 ``[count, columns]``."""
    random = np.random.default_rng(_SEED)
    ends = np.cumsum([int(source.offsets[-1]) for source in sources])
    positions = np.sort(random.choice(int(ends[-1]), count, replace=False))
    rows = []
    start = 0
    for source, stop in zip(sources, ends.tolist(), strict=True):
        columns = source.columns
        some = positions[np.searchsorted(positions, start) : np.searchsorted(positions, stop)] - start
        # From a position among the copied tokens to one among all.
        copied = source.offsets
        document = np.searchsorted(copied, some, side="right") - 1
        original = columns.offsets[:-1] if source.live is None else columns.offsets[:-1][source.live]
        tokens = original[document] + some - copied[document]
        if len(tokens):  # a segment that was written before the first rows has no width
            assert columns.rows is not None
            scales = None if columns.scales is None else columns.scales[tokens]
            rows.append(manifest.row_codec.unpack(columns.rows[tokens], scales, _dim(manifest)))
        start = stop
    sample = np.concatenate(rows)
    random.shuffle(sample)
    return sample
