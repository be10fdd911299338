"""Manifest: the files that one state of an index consists of, with their sizes and checksums."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from millpond.errors import IndexCorruptedError
from millpond.late_interaction.codecs.rows import CODECS

CURRENT = "CURRENT"
# Of the files of this version; a later one may read an older one's, never the reverse.
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of an index.

    Attributes:
        name: Its name in the index's folder.
        bytes: Its size.
        sha256: Checksum of its content, in hexadecimal digits.
    """

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SegmentEntry:
    """One segment: documents that were written together.

    Attributes:
        file: Rows, ids, texts and metadata.
        documents: Its documents, deleted ones included.
        tokens: Their token rows.
        coded: Whether its rows have centroid codes; rows are int8 without them.
        deleted: A bitmap of its deleted documents; ``None`` if there are none.
        deleted_documents: Documents in that bitmap.
        deleted_tokens: Their token rows.
    """

    file: FileEntry
    documents: int
    tokens: int
    coded: bool
    deleted: FileEntry | None = None
    deleted_documents: int = 0
    deleted_tokens: int = 0

    @property
    def live_documents(self) -> int:
        """Documents that are not deleted."""
        return self.documents - self.deleted_documents

    @property
    def live_tokens(self) -> int:
        """Their token rows."""
        return self.tokens - self.deleted_tokens


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One state of an index.

    Attributes:
        generation: 0 for a new index, one more with every change.
        next_number: Number of the next file that is written.
        payload: The codec: how rows are stored, in a Plaid index in coded segments.
        width: The option that the index was created with; ``settings`` have the width of the rows.
        pool_factor: The option that the index was created with.
        settings: :class:`millpond.late_interaction.index.settings.IndexSettings` as JSON; ``None`` as long as no row
            was added.
        projection: The file of their projection; ``None`` if they have none.
        codec: The file of the trained codec; ``None`` before training.
        trained_tokens: Token rows of the index when the codec was trained.
        segments: The segments, oldest first.
        saved: Whether ``MemoryIndex.save`` wrote it; then there is one segment.
    """

    generation: int = 0
    next_number: int = 1
    payload: str
    width: int | None = None
    pool_factor: int | None = None
    settings: Mapping[str, Any] | None = field(default=None, hash=False)
    projection: FileEntry | None = None
    codec: FileEntry | None = None
    trained_tokens: int = 0
    segments: tuple[SegmentEntry, ...] = ()
    saved: bool = False

    @property
    def name(self) -> str:
        """The manifest's own file."""
        return manifest_name(self.generation)

    @property
    def documents(self) -> int:
        """Documents that are not deleted."""
        return sum(segment.live_documents for segment in self.segments)

    @property
    def tokens(self) -> int:
        """Their token rows."""
        return sum(segment.live_tokens for segment in self.segments)

    def files(self) -> list[FileEntry]:
        """Every file that it names."""
        entries = [entry for entry in (self.projection, self.codec) if entry is not None]
        for segment in self.segments:
            entries.append(segment.file)
            if segment.deleted is not None:
                entries.append(segment.deleted)
        return entries

    def names(self) -> set[str]:
        """The names of its files and its own."""
        return {entry.name for entry in self.files()} | {self.name}

    def to_bytes(self) -> bytes:
        """As JSON, for :meth:`from_bytes`."""
        fields = asdict(self)
        if not self.saved:  # a key that earlier versions do not read
            del fields["saved"]
        return json.dumps({"format": _FORMAT, **fields}, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, path: Path, data: bytes) -> Self:
        """Read the content of a manifest file.

        Raises:
            IndexCorruptedError: It is of a later format, or no manifest.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            version = fields.pop("format")
            if version != _FORMAT:
                raise IndexCorruptedError(
                    f"{path} has format {version!r}, and this version of millpond reads {_FORMAT}; use a newer "
                    "version, or build the index anew"
                )
            if fields["payload"] not in CODECS:
                raise ValueError(f"unknown codec {fields['payload']!r}")
            codec, projection = fields.pop("codec"), fields.pop("projection")
            segments = tuple(_segment(segment) for segment in fields.pop("segments"))
            return cls(
                projection=None if projection is None else FileEntry(**projection),
                codec=None if codec is None else FileEntry(**codec),
                segments=segments,
                **fields,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexCorruptedError(
                f"{path} is not a manifest ({error}); restore it, or build the index anew"
            ) from error


def manifest_name(generation: int) -> str:
    """The file of a manifest."""
    return f"manifest-{generation:08d}.json"


def current_bytes(manifest: str, content: bytes) -> bytes:
    """The content of ``CURRENT``: a manifest's name and checksum."""
    return f"{manifest} {sha256(content).hexdigest()}\n".encode()


def read_current(path: Path, content: bytes) -> tuple[str, str]:
    """Name and checksum of the manifest that ``CURRENT`` names.

    Raises:
        IndexCorruptedError: It has another form.
    """
    try:
        name, checksum = content.decode("ascii").removesuffix("\n").split(" ")
        generation = name.removeprefix("manifest-").removesuffix(".json")
        if name != manifest_name(int(generation)) or len(checksum) != sha256().digest_size * 2:
            raise ValueError("no name and checksum of a manifest")
    except ValueError as error:
        raise IndexCorruptedError(f"{path} is damaged ({error}); restore it, or build the index anew") from error
    return name, checksum


def without_empty(manifest: Manifest) -> Manifest:
    """Without the segments whose documents are all deleted; without documents, centroids are trained anew."""
    segments = tuple(segment for segment in manifest.segments if segment.live_documents)
    if not segments:
        return replace(manifest, segments=(), codec=None, trained_tokens=0)
    return replace(manifest, segments=segments)


def _segment(fields: dict[str, Any]) -> SegmentEntry:
    file, deleted = fields.pop("file"), fields.pop("deleted")
    return SegmentEntry(file=FileEntry(**file), deleted=None if deleted is None else FileEntry(**deleted), **fields)
