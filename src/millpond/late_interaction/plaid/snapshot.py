"""Snapshot: one state of an index, opened. It never changes, and stays readable whatever is written meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import IndexCorruptedError, SourceNotFoundError
from millpond.late_interaction.codecs.residual import ResidualCodec
from millpond.late_interaction.codecs.rows import CODECS
from millpond.late_interaction.index.settings import IndexSettings
from millpond.late_interaction.kernels.centroids import Groups
from millpond.late_interaction.plaid.segment import Segment
from millpond.late_interaction.plaid.storage.array_file import ArrayFile, ArrayFileWriter, ArraySpec
from millpond.late_interaction.plaid.storage.columns import id_hashes
from millpond.late_interaction.plaid.storage.folder import IndexFolder
from millpond.late_interaction.plaid.storage.manifest import FileEntry, Manifest

_GROUPS = ("centers", "members", "offsets")


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """One state of an index.

    Attributes:
        current: The content of ``CURRENT`` that named it.
        manifest: Its manifest.
        segments: Its segments, oldest first.
        codec: Its codec; ``None`` before training.
        settings: How texts became its rows; ``None`` as long as there are none.
    """

    current: bytes
    manifest: Manifest
    segments: tuple[Segment, ...]
    codec: ResidualCodec | None
    settings: IndexSettings | None

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
    """Open the state that ``CURRENT`` names now.

    Args:
        folder: The index.
        known: An earlier state, whose open files are used again.

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


def write_codec(path: Path, codec: ResidualCodec, *, mode: int = 0o666) -> None:
    """Write the file of a codec. The caller syncs it."""
    arrays = {name: array for name, array in codec.arrays().items() if name != "bits"}  # the payload says that
    groups = codec.centroids.groups
    if groups is not None:  # computing them takes as long as encoding thousands of rows
        arrays |= {f"group_{name}": getattr(groups, name) for name in _GROUPS}
    specs = {name: ArraySpec(dtype=array.dtype.name, shape=array.shape) for name, array in arrays.items()}
    with ArrayFileWriter(path, specs, mode=mode) as file:
        for name, array in arrays.items():
            file.write(name, array)


def write_projection(path: Path, matrix: npt.NDArray[np.float32], *, mode: int = 0o666) -> None:
    """Write the file of a projection. The caller syncs it."""
    specs = {"matrix": ArraySpec(dtype="float32", shape=matrix.shape)}
    with ArrayFileWriter(path, specs, mode=mode) as file:
        file.write("matrix", matrix)


def _open(folder: IndexFolder, current: bytes, known: Snapshot | None) -> Snapshot:
    manifest = folder.manifest(current)
    segments_known = {} if known is None else {segment.entry.file: segment for segment in known.segments}
    segments = tuple(Segment.open(folder.path, entry, segments_known) for entry in manifest.segments)
    if manifest.codec is None:
        codec = None
    elif known is not None and known.manifest.codec == manifest.codec:
        codec = known.codec
    else:
        codec = _read_codec(folder.path, manifest.codec, manifest)
    if known is not None and (known.manifest.settings, known.manifest.projection) == (
        manifest.settings,
        manifest.projection,
    ):
        settings = known.settings
    else:
        settings = _read_settings(folder.path, manifest)
    return Snapshot(current=current, manifest=manifest, segments=segments, codec=codec, settings=settings)


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


def _read_codec(folder: Path, entry: FileEntry, manifest: Manifest) -> ResidualCodec:
    path = folder / entry.name
    arrays = _read_arrays(path, entry)
    arrays["bits"] = np.array(CODECS[manifest.payload].bits)
    width = (manifest.settings or {}).get("width")
    try:
        codec = ResidualCodec.from_arrays(arrays)
        if codec.dim != width:
            raise ValueError(f"its rows have {codec.dim} columns instead of {width}")
    except (KeyError, ValueError) as error:
        raise IndexCorruptedError(f"{path} is damaged ({error}); restore it, or build the index anew") from error
    if "group_centers" in arrays:
        # Where the cached property keeps what it would compute.
        vars(codec.centroids)["groups"] = Groups(**{name: arrays[f"group_{name}"] for name in _GROUPS})
    return codec


def _read_arrays(path: Path, entry: FileEntry) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file that is small, and that everything depends on: its checksum is compared."""
    file = ArrayFile(path, entry.bytes)
    file.check(entry.sha256)
    return {name: np.array(array) for name, array in file.arrays.items()}
