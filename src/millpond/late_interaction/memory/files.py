"""MemoryIndex on disk: a folder as PlaidIndex has it, whose rows and documents are one segment.

A save writes new files beside those of the index that is there, replaces ``CURRENT`` in one step, and then deletes the
old files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np

from millpond.errors import IndexCorruptedError, InvalidRequestError, SourceNotFoundError
from millpond.late_interaction.codecs.names import MemoryCodec
from millpond.late_interaction.codecs.residual import ResidualCodec
from millpond.late_interaction.codecs.rows import Codec
from millpond.late_interaction.index.settings import IndexSettings
from millpond.late_interaction.kernels.centroids import Centroids
from millpond.late_interaction.memory import old_files
from millpond.late_interaction.memory.blocks import Batch
from millpond.late_interaction.memory.store import Snapshot
from millpond.late_interaction.plaid.segment import Segment
from millpond.late_interaction.plaid.segment_writer import OFFSETS_OF, segment_specs
from millpond.late_interaction.plaid.snapshot import open_snapshot, write_arrays, write_trained
from millpond.late_interaction.plaid.storage.array_file import ArrayFileWriter
from millpond.late_interaction.plaid.storage.columns import ByteStrings, Ids, id_hashes, metadata_bytes
from millpond.late_interaction.plaid.storage.folder import OWN_FILES, IndexFolder, Transaction
from millpond.late_interaction.plaid.storage.lock import LOCK, WriteLock
from millpond.late_interaction.plaid.storage.manifest import CURRENT, Manifest, SegmentEntry
from millpond.vectors.ragged import runs

_PRIVATE = 0o600
_ROWS = 1 << 18  # rows read at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredIndex:
    """A saved index."""

    codec: str  # the name of its codec
    settings: IndexSettings | None  # how its rows were made; `None` if it has none
    dimensions: int | None  # the option that its first rows will be made with
    pool_factor: int | None  # the option that its first rows will be made with
    tokens: int  # its rows
    centroids: Centroids | None  # what its codes refer to; `None` without codes
    trained_tokens: int  # tokens that the centroids were trained for
    batches: Iterator[Batch]  # its documents in order


def write_index(
    path: Path,
    snapshot: Snapshot,
    codec: Codec,
    settings: IndexSettings | None,
    *,
    dimensions: int | None,
    pool_factor: int | None,
) -> None:
    """Write an index to a folder, in place of the one that may be there.

    ``dimensions`` and ``pool_factor`` are the options that its first rows will be made with, as long as it has no
    settings.

    Raises:
        InvalidRequestError: The path is a file, or a folder with other files or another kind of index.
        IndexCorruptedError: The index that is there is damaged.
    """
    _make_folder(path)
    folder = IndexFolder(path)
    with WriteLock(path / LOCK).held(threading.TIMEOUT_MAX):
        transaction = Transaction(folder, _manifest_of(folder), mode=_PRIVATE)
        with transaction.rolled_back_on_error():
            manifest = Manifest(
                payload=codec.name,
                width=dimensions,
                pool_factor=pool_factor,
                settings=None if settings is None else settings.to_json(),
                saved=True,
            )
            manifest = transaction.commit(_write_files(transaction, manifest, snapshot, codec, settings))
        folder.remove([*folder.orphans(manifest), *old_files.names(path)])


def read_index(path: Path) -> StoredIndex:
    """Read a saved index. Checksums are compared before the first document is read.

    Raises:
        SourceNotFoundError: There is no saved index.
        InvalidRequestError: There is a PlaidIndex.
        IndexCorruptedError: A file is missing, damaged, or of a later version.
    """
    if not (path / CURRENT).is_file():
        if not old_files.names(path):
            raise SourceNotFoundError(f"{str(path)!r} has no index that MemoryIndex.save wrote; check the path")
        return StoredIndex(**old_files.read(path))
    snapshot = open_snapshot(IndexFolder(path))
    manifest, trained = snapshot.manifest, snapshot.trained
    if not manifest.saved:
        raise InvalidRequestError(f"{str(path)!r} has a PlaidIndex; open it with PlaidIndex.open")
    if manifest.payload not in get_args(MemoryCodec):
        raise IndexCorruptedError(f"{path / manifest.name} is damaged: no saved index has codec {manifest.payload!r}")
    centroids = None if trained is None else trained.centroids
    return StoredIndex(
        codec=manifest.payload,
        settings=snapshot.settings,
        dimensions=manifest.width,
        pool_factor=manifest.pool_factor,
        tokens=manifest.tokens,
        centroids=centroids,
        trained_tokens=manifest.trained_tokens,
        batches=_batches(
            snapshot.segments, manifest.row_codec, snapshot.settings, 0 if centroids is None else len(centroids)
        ),
    )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InvalidRequestError(f"{str(path)!r} is a file or lies in one; save the index to a folder") from None
    known = {LOCK, *old_files.names(path)}
    foreign = [name for name in os.listdir(path) if name not in known and not OWN_FILES.fullmatch(name)]
    if foreign:
        raise InvalidRequestError(
            f"{str(path)!r} has other files, as {min(foreign)!r}; save the index to an empty or new folder"
        )
    IndexFolder(path.parent).sync()


def _manifest_of(folder: IndexFolder) -> Manifest:
    """What is there now: nothing, before the first save."""
    if not (folder.path / CURRENT).is_file():
        return Manifest(generation=-1, payload="")
    manifest = folder.manifest(folder.current())
    if not manifest.saved:
        raise InvalidRequestError(f"{str(folder.path)!r} has a PlaidIndex; save the index to an empty or new folder")
    return manifest


def _write_files(
    transaction: Transaction, manifest: Manifest, snapshot: Snapshot, codec: Codec, settings: IndexSettings | None
) -> Manifest:
    """Write everything but the manifest; returns the one that names the files."""
    projection = trained = entry = None
    if settings is not None and settings.projection is not None:
        path = transaction.new_path("projection")
        write_arrays(path, {"matrix": settings.projection.matrix}, mode=_PRIVATE)
        projection = transaction.entry(path)
    if snapshot.centroids is not None:
        spread = np.ones(snapshot.centroids.dim, dtype=np.float32)  # of residuals, which are not stored
        trained = ResidualCodec(centroids=snapshot.centroids, std=spread, bits=0)
        path = transaction.new_path("codec")
        write_trained(path, trained, mode=_PRIVATE)
        entry = transaction.entry(path)
    path = transaction.new_path("segment")
    _write_segment(path, snapshot, codec, trained, dim=0 if settings is None else settings.width)
    file, coded = transaction.entry(path), trained is not None
    segment = SegmentEntry(file=file, documents=snapshot.documents, tokens=snapshot.tokens, coded=coded)
    trained_tokens = snapshot.trained_tokens
    return replace(manifest, projection=projection, codec=entry, trained_tokens=trained_tokens, segments=(segment,))


def _write_segment(path: Path, snapshot: Snapshot, codec: Codec, trained: ResidualCodec | None, *, dim: int) -> None:
    """Write the documents. Their texts are encoded twice, so that they are not in memory twice."""
    sizes = np.array([tuple(map(len, _encoded(*document))) for document in snapshot.contents()], dtype=np.int64)
    ends = np.zeros((len(sizes) + 1, 3), dtype=np.int64)  # [documents + 1, ids texts metadata]
    np.cumsum(sizes.reshape(-1, 3), axis=0, out=ends[1:])
    hashes = id_hashes([id.encode() for id, _, _ in snapshot.contents()])
    ids = Ids.of(ByteStrings(data=np.empty(0, dtype=np.uint8), offsets=ends[:, 0]), hashes)
    lengths = [view.lengths[view.live_numbers()] for view in snapshot.views]
    totals = dict(zip(OFFSETS_OF, ends[-1].tolist(), strict=True))
    specs = segment_specs(len(sizes), snapshot.tokens, totals, dim=dim, codec=codec, trained=trained)
    with ArrayFileWriter(path, specs, mode=_PRIVATE) as file:
        file.write("offsets", np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *lengths])))
        file.write("id_hashes", ids.hashes)
        file.write("id_order", ids.order)
        for column, name in enumerate(OFFSETS_OF.values()):
            file.write(name, ends[:, column])
        document = token = 0
        for batch in snapshot.batches():
            for name, part in (("rows", batch.rows), ("scales", batch.scales), ("codes", batch.codes)):
                if part is not None and len(part):
                    file.write(name, part, token)
            strings = zip(*map(_encoded, batch.ids, batch.texts, batch.metadata), strict=True)
            for name, start, parts in zip(totals, ends[document].tolist(), strings, strict=True):
                file.write(name, b"".join(parts), start)
            document, token = document + len(batch), token + len(batch.rows)


def _encoded(id: str, text: str, metadata: object) -> tuple[bytes, bytes, bytes]:
    return id.encode(), text.encode(), metadata_bytes(metadata)


def _batches(
    segments: tuple[Segment, ...], codec: Codec, settings: IndexSettings | None, centroids: int
) -> Iterator[Batch]:
    """The documents in order, about ``_ROWS`` rows at a time."""
    width = 0 if settings is None else settings.width
    for segment in segments:
        file = segment.file
        file.check(segment.entry.file.sha256)
        columns = file.tokens(centroids)
        rows, scales, codes = columns.rows, columns.scales, columns.codes
        fits = rows is not None and rows.dtype == codec.dtype and rows.shape[1] == codec.width(width)
        if rows is None or not fits or codec.scaled == (scales is None):
            raise IndexCorruptedError(f"{file.path} is damaged: its rows are not {width} columns of {codec.name}")
        for start, stop in runs(columns.offsets, _ROWS, _ROWS):
            part, documents = slice(int(columns.offsets[start]), int(columns.offsets[stop])), range(start, stop)
            yield Batch(
                ids=list(map(file.id, documents)),
                texts=list(map(file.text, documents)),
                metadata=list(map(file.object, documents)),
                lengths=np.diff(columns.offsets[start : stop + 1]),
                width=width,
                rows=rows[part],
                scales=None if scales is None else np.array(scales[part]),
                codes=None if codes is None else codes[part],
            )
