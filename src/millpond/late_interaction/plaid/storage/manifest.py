"""Manifest: the files that one state of an index consists of, with their sizes and checksums."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from millpond.errors import IndexCorruptedError
from millpond.late_interaction.codecs.rows import CODECS, Codec

CURRENT = "CURRENT"
# Of the files of this version; a later one may read an older one's, never the reverse.
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of an index: its name there, its size, and the checksum of its content in hexadecimal digits."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SegmentEntry:
    """One segment: documents that were written together."""

    file: FileEntry  # rows, ids, texts and metadata
    documents: int  # its documents, deleted ones included
    tokens: int  # their token rows
    coded: bool  # whether its rows have centroid codes
    deleted: FileEntry | None = None  # A bitmap of its deleted documents; `None` if there are none
    deleted_documents: int = 0  # documents in that bitmap
    deleted_tokens: int = 0  # their token rows

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
    """One state of an index."""

    generation: int = 0  # 0 for a new index, one more with every change
    next_number: int = 1  # number of the next file that is written
    payload: str  # the name of the codec
    width: int | None = None  # the option that the index was created with; `settings` have the width of the rows
    pool_factor: int | None = None  # the option that the index was created with
    # `IndexSettings` as JSON; `None` as long as no row was added
    settings: Mapping[str, Any] | None = field(default=None, hash=False)
    projection: FileEntry | None = None  # the file of their projection; `None` if they have none
    codec: FileEntry | None = None  # the file of the centroids and the residual codec; `None` before training
    trained_tokens: int = 0  # token rows of the index when the centroids were trained
    segments: tuple[SegmentEntry, ...] = ()  # the segments, oldest first
    saved: bool = False  # whether `MemoryIndex.save` wrote it; then there is one segment

    @property
    def row_codec(self) -> Codec:
        """How rows are stored."""
        return CODECS[self.payload]

    @property
    def name(self) -> str:
        """The manifest's own file."""
        return f"manifest-{self.generation:08d}.json"

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
        segments = [entry for segment in self.segments for entry in (segment.file, segment.deleted)]
        return [entry for entry in (self.projection, self.codec, *segments) if entry is not None]

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
            for name in ("codec", "projection"):
                fields[name] = _file(fields[name])
            for segment in fields["segments"]:
                segment |= {"file": _file(segment["file"]), "deleted": _file(segment["deleted"])}
            fields["segments"] = tuple(SegmentEntry(**segment) for segment in fields["segments"])
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexCorruptedError(
                f"{path} is not a manifest ({error}); restore it, or build the index anew"
            ) from error


def _file(fields: dict[str, Any] | None) -> FileEntry | None:
    return None if fields is None else FileEntry(**fields)
