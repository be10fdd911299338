"""Segment: a mapped file of documents, and those of them that are deleted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import IndexCorruptedError
from millpond.late_interaction.index.metadata_filter import MetadataTable
from millpond.late_interaction.plaid.storage.array_file import ArrayFile
from millpond.late_interaction.plaid.storage.columns import ByteStrings, Columns, Ids
from millpond.late_interaction.plaid.storage.manifest import FileEntry, SegmentEntry
from millpond.support.cached_property import cached_property


class SegmentFile:
    """The documents of a segment, mapped: opening one reads a page.

    Raises:
        FileNotFoundError: There is no such file.
        IndexCorruptedError: It has another size, or other arrays than the manifest says.
    """

    def __init__(self, folder: Path, entry: SegmentEntry) -> None:
        self.path = folder / entry.file.name
        self._file = ArrayFile(self.path, entry.file.bytes)
        arrays = self._file.arrays
        try:
            self.columns = Columns(
                offsets=arrays["offsets"],
                scales=arrays.get("scales"),
                rows=arrays.get("rows"),
                codes=arrays["codes"] if entry.coded else None,
                residuals=arrays.get("residuals"),
                ids=Ids(
                    strings=ByteStrings(data=arrays["ids"], offsets=arrays["id_offsets"]),
                    hashes=arrays["id_hashes"],
                    order=arrays["id_order"],
                ),
                texts=ByteStrings(data=arrays["texts"], offsets=arrays["text_offsets"]),
                metadata=ByteStrings(data=arrays["metadata"], offsets=arrays["metadata_offsets"]),
            )
        except KeyError as error:
            raise self._damaged(f"it has no array {error}") from None
        columns = self.columns
        lengths = {len(array) for array in columns.token_arrays.values()}
        counts = {len(columns), len(columns.ids), len(columns.ids.order), len(columns.texts), len(columns.metadata)}
        one_kind = (columns.rows is None) != (columns.residuals is None)
        if lengths != {entry.tokens} or counts != {entry.documents} or not one_kind:
            raise self._damaged("its arrays do not have the lengths in the manifest")

    def check(self, sha256: str) -> None:
        """Read all of it, and raise IndexCorruptedError if its checksum is another one."""
        self._file.check(sha256)

    def tokens(self, centroids: int) -> Columns:
        """The columns, once it is certain that offsets and codes point inside the arrays: kernels do not check that.

        Raises:
            IndexCorruptedError: They do not, with this number of centroids.
        """
        ordered, largest = self._checked_tokens
        if largest >= max(centroids, 1) or not ordered:
            raise self._damaged("its offsets or codes point outside of its arrays")
        return self.columns

    @cached_property
    def metadata(self) -> MetadataTable:
        """Its metadata by key and value."""
        count = len(self.columns)
        return MetadataTable(count, lambda: map(self.object, range(count)))

    def id(self, document: int) -> str:
        """The id of a document."""
        return self._decoded(self.columns.ids.strings, document)

    def text(self, document: int) -> str:
        """The text of a document."""
        return self._decoded(self.columns.texts, document)

    def object(self, document: int) -> Mapping[str, Any]:
        """The metadata of a document."""
        data = self.columns.metadata[document]
        try:
            value = json.loads(data) if data else {}
            if not isinstance(value, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise self._damaged(f"the metadata of document {document} is no JSON object") from error
        return value

    def _decoded(self, strings: ByteStrings, document: int) -> str:
        try:
            return strings[document].decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"the id or text of document {document} is no UTF-8") from error

    @cached_property
    def _checked_tokens(self) -> tuple[bool, int]:
        """Whether the offsets are in order, and the largest code."""
        offsets, codes = self.columns.offsets, self.columns.codes
        tokens = len(next(iter(self.columns.token_arrays.values())))
        ordered = offsets[0] == 0 and offsets[-1] == tokens and bool((np.diff(offsets) >= 0).all())
        return bool(ordered), 0 if codes is None or not len(codes) else int(codes.max())

    def _damaged(self, reason: str) -> IndexCorruptedError:
        return IndexCorruptedError(f"{self.path} is damaged: {reason}; restore it, or build the index anew")


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A segment as one manifest has it."""

    entry: SegmentEntry  # what the manifest says of it
    file: SegmentFile  # its documents
    live: npt.NDArray[np.bool_] | None  # bool `[documents]`, those that are not deleted; `None` if all are

    @classmethod
    def open(cls, folder: Path, entry: SegmentEntry, known: Mapping[FileEntry, Segment]) -> Segment:
        """Open a segment, or take those parts of it that are known by their files."""
        before = known.get(entry.file)
        file = SegmentFile(folder, entry) if before is None else before.file
        if entry.deleted is None:
            live = None
        elif before is not None and before.entry.deleted == entry.deleted:
            live = before.live
        else:
            live = ~_read_bitmap(folder, entry.deleted, entry.documents)
        return cls(entry=entry, file=file, live=live)


def bitmap(mask: npt.NDArray[np.bool_]) -> bytes:
    """A mask as it is stored: a bit for each document, the first in the lowest bit."""
    return np.packbits(mask, bitorder="little").tobytes()


def _read_bitmap(folder: Path, entry: FileEntry, documents: int) -> npt.NDArray[np.bool_]:
    path = folder / entry.name
    content = path.read_bytes()
    if len(content) != -(-documents // 8) or hashlib.sha256(content).hexdigest() != entry.sha256:
        raise IndexCorruptedError(
            f"{path} is damaged: its size or checksum is not the one in the manifest; restore it, or build the index "
            "anew"
        )
    bits = np.unpackbits(np.frombuffer(content, dtype=np.uint8), count=documents, bitorder="little")
    return bits.view(np.bool_)
