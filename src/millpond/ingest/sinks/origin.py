"""RowOrigin: where a row comes from, as far as it, its collection and its source can still say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np

from millpond.ingest.chunking import CHUNK_KEYS
from millpond.ingest.record import content_hash
from millpond.ingest.sinks.fields import is_own_row
from millpond.ingest.sinks.protocol import StoredRow
from millpond.ingest.sinks.stored_rows import rows_manifest

if TYPE_CHECKING:
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.run_note import RunNote

# Keys of metadata that name a file, relative to the folder that was ingested or absolute.
_FILE_KEYS = ("path", "file_path", "source", "file")
_LINE_KEYS = ("first_line", "last_line")
# Of these files a text is extracted, which is not what they hold.
_MARKED_UP = (".html", ".htm", ".xhtml", ".xml", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".ipynb")
_SHOWN_CHARS = 200
_FILE_BYTES = 16 << 20  # of a longer file nothing is compared


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """The file that a row was read from.

    Attributes:
        path: Its path.
        state: ``has the text``, ``has the text in other lines`` than those that the metadata names, ``has another
            text``, ``is not there``, or ``is not compared``, of one that holds no plain text.
    """

    path: str
    state: str


@dataclass(frozen=True, kw_only=True)
class RowOrigin:
    """A row with all that is known of where it comes from.

    Attributes:
        row_id: Its id in the database.
        record_id: The id of its record.
        by_framework: Whether a framework wrote it, under an id of its own.
        chunk: Its number among the pieces of its record, from 0; ``None`` of a whole record.
        span: The characters of the record's text that it holds; ``None`` of a whole record.
        text: The beginning of its text.
        characters: The length of its text.
        metadata: Its metadata.
        content_hash: The hash of the text that its vectors were made of; empty if none is stored.
        hash_fits: Whether the stored text has that hash; ``None`` without one.
        norms: The length of its vector of each width that can be read; a vector that is compared has length 1.
        file: The file that it was read from; ``None`` if none is known.
        runs: The runs that may have written it: those that the collection knows.
    """

    row_id: str
    record_id: str
    by_framework: bool
    chunk: int | None
    span: tuple[int, int] | None
    text: str
    characters: int
    metadata: Mapping[str, Any]
    content_hash: str
    hash_fits: bool | None
    norms: Mapping[int, float]
    file: RowFile | None
    runs: Sequence[RunNote]

    def to_json(self) -> dict[str, Any]:
        """Everything but the runs, as JSON holds it."""
        return {
            "row": self.row_id,
            "record": self.record_id,
            "by_framework": self.by_framework,
            "chunk": self.chunk,
            "span": None if self.span is None else list(self.span),
            "text": self.text,
            "characters": self.characters,
            "metadata": dict(self.metadata),
            "content_hash": self.content_hash or None,
            "hash_fits": self.hash_fits,
            "norms": {str(width): norm for width, norm in self.norms.items()},
            "file": None if self.file is None else {"path": self.file.path, "state": self.file.state},
        }


def trace(sink: CollectionSink[Any], row_or_record: str) -> list[RowOrigin]:
    """The rows of an id, with what is known of where they come from.

    Args:
        sink: The sink of the collection.
        row_or_record: The id of a row, or of a record, of which all chunks are returned.

    Returns:
        The rows, the chunks of a record in their order; empty if the collection has no such id.

    Raises:
        InvalidRequestError: There is no such collection, or it holds token vectors.
        FingerprintMismatchError: Millpond did not make it.
        SinkError: The database does not answer, or reads no rows back.
    """
    manifest = rows_manifest(sink, verb="traced")
    ids = dict.fromkeys([*sink.row_ids(row_or_record), *_row_id(row_or_record)])
    chunks = sink.chunks_from({row_or_record: 1})
    rows = sink.read_rows([*ids, *(row_id for row_id in chunks if row_id not in ids)], widths=manifest.dimensions)
    found = [_origin(row_id, row, manifest.runs) for row_id, row in rows.items()]
    return sorted(found, key=lambda origin: (origin.record_id, origin.chunk or 0))


def _row_id(text: str) -> list[str]:
    """The id as that of a row, if it can be one in any database."""
    try:
        return [str(UUID(text))]
    except ValueError:
        return []


def _origin(row_id: str, row: StoredRow, runs: Sequence[RunNote]) -> RowOrigin:
    metadata, text = dict(row.metadata or {}), row.text or ""
    number, start, end = (metadata.get(key) for key in CHUNK_KEYS)
    span = (start, end) if type(start) is int and type(end) is int else None
    return RowOrigin(
        row_id=row_id,
        record_id=row.record_id,
        by_framework=not is_own_row(row.record_id, row_id, metadata),
        chunk=number if type(number) is int and span is not None else None,
        span=span,
        text=text[:_SHOWN_CHARS],
        characters=len(text),
        metadata=metadata,
        content_hash=row.content_hash,
        hash_fits=row.content_hash == content_hash(text) if row.content_hash else None,
        norms={width: float(np.linalg.norm(vector)) for width, vector in row.vectors.items()},
        file=_file(row, text, runs),
        runs=tuple(runs),
    )


def _file(row: StoredRow, text: str, runs: Sequence[RunNote]) -> RowFile | None:
    """The file that the metadata or the id names: an absolute path, or one in a folder that a run read."""
    metadata = row.metadata or {}
    names = [name for key in _FILE_KEYS if isinstance(name := metadata.get(key), str)]
    folders = [run.source for run in reversed(runs) if os.path.isdir(run.source)]
    first, last = (metadata.get(key) for key in _LINE_KEYS)
    lines = slice(first - 1, last) if type(first) is int and type(last) is int and 0 < first <= last else None
    for name in (*names, row.record_id):
        if os.path.isabs(name) and name in names:
            return RowFile(path=name, state=_state(name, text, lines))
        for folder in folders:
            if os.path.isfile(path := os.path.join(folder, name)):
                return RowFile(path=path, state=_state(path, text, lines))
    if folders and all(run.source in folders for run in runs if run.command == "ingest"):
        name = metadata.get("path", row.record_id)  # the id of a whole file is its path
        return RowFile(path=os.path.join(folders[0], str(name)), state="is not there")
    return None


def _state(path: str, text: str, lines: slice | None) -> str:
    """What a file has to do with a text, now."""
    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES + 1)
        whole = content.decode("utf-8-sig").splitlines()
    except OSError:
        return "is not there"
    except UnicodeDecodeError:
        return "is not compared"
    if len(content) > _FILE_BYTES:
        return "is not compared"
    wanted = "\n".join(text.splitlines()).strip()
    if wanted in "\n".join(whole):
        return "has the text" if lines is None or wanted in "\n".join(whole[lines]) else "has the text in other lines"
    return "is not compared" if path.lower().endswith(_MARKED_UP) else "has another text"
