"""Snapshot: one state of an index, opened. It never changes, and stays readable whatever is written meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import IndexCorruptedError, SourceNotFoundError
from millpond.late_interaction.codecs.residual import ResidualCodec
from millpond.late_interaction.index.settings import IndexSettings
from millpond.late_interaction.kernels.centroids import Centroids, Groups
from millpond.late_interaction.plaid.segment import Segment
from millpond.late_interaction.plaid.storage.array_file import ArrayFile, ArrayFileWriter, ArraySpec
from millpond.late_interaction.plaid.storage.columns import id_hashes
from millpond.late_interaction.plaid.storage.folder import IndexFolder
from millpond.late_interaction.plaid.storage.manifest import FileEntry, Manifest

_GROUPS = ("centers", "members", "offsets")


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """One state of an index."""

    current: bytes  # the content of `CURRENT` that named it
    manifest: Manifest
    segments: tuple[Segment, ...]  # its segments, oldest first
    trained: ResidualCodec | None  # its centroids and residual codec; `None` before training
    settings: IndexSettings | None  # how texts became its rows; `None` as long as there are none

    def find(self, ids: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """For each segment, the live documents among these ids, -1 for an id that is not in it."""
        encoded = [id.encode() for id in ids]
        hashes = id_hashes(encoded)
        found = []
        for segment in self.segments:
            documents = segment.file.columns.ids.find(encoded, hashes)
            if segment.live is not None:
                documents[(documents >= 0) & ~segment.live[documents]] = -1
            found.append(documents)
        return found


def open_snapshot(folder: IndexFolder, known: Snapshot | None = None) -> Snapshot:
    """Open the state that ``CURRENT`` names now, with the files that an earlier state has open already.

    Raises:
        SourceNotFoundError: There is no index.
        IndexCorruptedError: A file is missing or damaged.
    """
    while True:
        current = folder.current()
        if known is not None and known.current == current:
            return known
        try:
            return _open(folder, current, known)
        except SourceNotFoundError:
            raise
        except FileNotFoundError as error:
            # A writer may have removed it since; then CURRENT names other files.
            if folder.current() == current:
                raise IndexCorruptedError(f"{error.filename} is missing; restore it, or build the index anew") from None


def write_trained(path: Path, trained: ResidualCodec, *, mode: int = 0o666) -> None:
    """Write the file of centroids and residual codec. The caller syncs it."""
    centroids = trained.centroids
    arrays: dict[str, npt.NDArray[Any]]
    arrays = {"centroids": centroids.rows, "centroid_scales": centroids.scales, "std": trained.std}
    if trained.limits is not None:
        arrays["limits"] = np.array(trained.limits, dtype=np.float32)
    if centroids.groups is not None:  # computing them takes as long as encoding thousands of rows
        arrays |= {f"group_{name}": getattr(centroids.groups, name) for name in _GROUPS}
    write_arrays(path, arrays, mode=mode)


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]], *, mode: int = 0o666) -> None:
    """Write a file of small arrays. The caller syncs it."""
    specs = {name: ArraySpec(dtype=array.dtype.name, shape=array.shape) for name, array in arrays.items()}
    with ArrayFileWriter(path, specs, mode=mode) as file:
        for name, array in arrays.items():
            file.write(name, array)


def _open(folder: IndexFolder, current: bytes, known: Snapshot | None) -> Snapshot:
    manifest = folder.manifest(current)
    segments_known = {} if known is None else {segment.entry.file: segment for segment in known.segments}
    segments = tuple(Segment.open(folder.path, entry, segments_known) for entry in manifest.segments)
    before = None if known is None else known.manifest
    if known is not None and before is not None and before.codec == manifest.codec:
        trained = known.trained
    else:
        trained = _read_trained(folder.path, manifest.codec, manifest)
    made = (manifest.settings, manifest.projection)
    if known is not None and before is not None and (before.settings, before.projection) == made:
        settings = known.settings
    else:
        settings = _read_settings(folder.path, manifest)
    return Snapshot(current=current, manifest=manifest, segments=segments, trained=trained, settings=settings)


def _read_settings(folder: Path, manifest: Manifest) -> IndexSettings | None:
    if manifest.settings is None:
        return None
    path, matrix = folder / manifest.name, None
    try:
        if manifest.projection is not None:
            path = folder / manifest.projection.name
            matrix = _read_arrays(path, manifest.projection)["matrix"]
        return IndexSettings.from_json(manifest.settings, matrix)
    except (KeyError, TypeError, ValueError) as error:
        raise IndexCorruptedError(f"{path} is damaged ({error}); restore it, or build the index anew") from error


def _read_trained(folder: Path, entry: FileEntry | None, manifest: Manifest) -> ResidualCodec | None:
    if entry is None:
        return None
    path = folder / entry.name
    arrays = _read_arrays(path, entry)
    width = (manifest.settings or {}).get("width")
    try:
        centroids = Centroids(rows=arrays["centroids"], scales=arrays["centroid_scales"])
        if centroids.dim != width:
            raise ValueError(f"its rows have {centroids.dim} columns instead of {width}")
        limits = arrays.get("limits")
        trained = ResidualCodec(
            centroids=centroids,
            std=arrays["std"],
            bits=manifest.row_codec.bits,
            limits=None if limits is None else (float(limits[0]), float(limits[1])),
        )
    except (IndexError, KeyError, ValueError) as error:
        raise IndexCorruptedError(f"{path} is damaged ({error}); restore it, or build the index anew") from error
    if "group_centers" in arrays:
        # Where the cached property keeps what it would compute.
        vars(centroids)["groups"] = Groups(**{name: arrays[f"group_{name}"] for name in _GROUPS})
    return trained


def _read_arrays(path: Path, entry: FileEntry) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file that is small, and that everything depends on: its checksum is compared."""
    file = ArrayFile(path, entry.bytes)
    file.check(entry.sha256)
    return {name: np.array(array) for name, array in file.arrays.items()}
