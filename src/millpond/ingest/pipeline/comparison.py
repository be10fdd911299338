"""Rows compared with the records that they were made of: their texts, metadata and hashes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from millpond.errors import SinkError
from millpond.ingest.chunking import CHUNK_KEYS, LINE_KEYS, is_chunk
from millpond.ingest.pipeline.delivery import RetryingWriter
from millpond.ingest.pipeline.embedder import record_key
from millpond.ingest.pipeline.journal import JournalEntry
from millpond.ingest.record import Record, content_hash, point_id
from millpond.ingest.sinks.protocol import Reads, ReadsContent, StoredRow

_IDS_PER_SELECT = 500
_PIECE_KEYS = (*CHUNK_KEYS, *LINE_KEYS)


def read_rows(
    sink: Reads, requests: RetryingWriter, row_ids: Sequence[str], widths: Sequence[int] = ()
) -> dict[str, StoredRow]:
    """Rows with their texts and metadata, where the sink can read these."""
    read: Callable[..., dict[str, StoredRow]] = sink.read_rows if isinstance(sink, ReadsContent) else sink.fetch
    return requests.send(lambda: read(row_ids, widths=widths))


def has_content(row: StoredRow, record: Record) -> bool:
    """Whether a row has the text and the metadata of a record, as far as the sink can read them."""
    return (
        row.content_hash in ("", content_hash(record.text))
        and row.text in (None, record.text)
        and (row.metadata is None or row.metadata == record.metadata)
    )


def changed_rows(
    sink: Reads, requests: RetryingWriter, records: Mapping[str, Sequence[Record]], *, chunked: bool
) -> set[str]:
    """The keys of those records, each with its chunks, whose rows are not as they should be."""
    wanted = {key: [point_id(chunk.id, chunk.chunk) for chunk in chunks] for key, chunks in records.items()}
    if chunked:  # of a longer text that the record had, one more row is left
        beyond = {key: point_id(chunks[0].id, len(chunks)) for key, chunks in records.items() if not chunks[0].chunk}
    else:
        beyond = {}
    stored = read_rows(sink, requests, [*(each for ids in wanted.values() for each in ids), *beyond.values()])
    return {
        key
        for key, ids in wanted.items()
        if beyond.get(key) in stored
        or any(
            (row := stored.get(row_id)) is None or not has_content(row, chunk)
            for row_id, chunk in zip(ids, records[key], strict=True)
        )
    }


class ExpectedContent:
    """Hashes of the records of a source, in a temporary file that sqlite deletes. For one thread."""

    def __init__(self, *, chunked: bool) -> None:
        self._chunked = chunked  # then rows may be pieces of their records
        self._file = sqlite3.connect("", isolation_level=None)
        self._file.execute("CREATE TABLE records (key TEXT PRIMARY KEY, text TEXT, metadata BLOB) WITHOUT ROWID")
        self._file.execute("PRAGMA journal_mode=OFF")

    def note(self, records: Iterable[Record]) -> None:
        """Records that the collection should hold; a later one with the same id takes the place of an earlier one."""
        rows = []
        for record in records:
            whole = not self._chunked or is_chunk(record)
            text = content_hash(record.text) if whole else None
            rows.append((record_key(record), text, _metadata_hash(record.metadata, whole=whole)))
        try:
            self._file.execute("BEGIN")
            self._file.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", rows)
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            raise SinkError(
                f"the hashes of the source cannot be kept in a temporary file ({error}); free some space, or set "
                "SQLITE_TMPDIR to another folder"
            ) from error

    def different(self, entries: Sequence[JournalEntry], rows: Mapping[str, StoredRow]) -> set[str]:
        """The keys of entries with a row that has another text or other metadata than its record."""
        known: dict[str, tuple[str | None, bytes]] = {}
        for start in range(0, len(entries), _IDS_PER_SELECT):
            part = [entry.id for entry in entries[start : start + _IDS_PER_SELECT]]
            query = f"SELECT key, text, metadata FROM records WHERE key IN ({','.join('?' * len(part))})"
            known.update((key, (text, hashed)) for key, text, hashed in self._file.execute(query, part))
        return {
            entry.id
            for entry in entries
            for chunk in range(entry.chunks)
            if (row := rows.get(point_id(entry.id, chunk))) is not None and not _agrees(row, known.get(entry.id))
        }


def _agrees(row: StoredRow, expected: tuple[str | None, bytes] | None) -> bool:
    """Whether a row has the text of its own hash, and what is known of its record, which may be nothing."""
    hashed = row.content_hash if row.text is None else content_hash(row.text)
    if row.content_hash not in ("", hashed):
        return False
    if expected is None:
        return True
    text, metadata = expected
    if text is not None and hashed not in ("", text):
        return False
    return row.metadata is None or _metadata_hash(row.metadata, whole=text is not None) == metadata


def _metadata_hash(metadata: Mapping[str, Any], *, whole: bool) -> bytes:
    """A hash of metadata, in which 1.0 is 1; of a record that may be cut, without the keys of its pieces."""
    shown = metadata if whole else {key: value for key, value in metadata.items() if key not in _PIECE_KEYS}
    return blake2b(json.dumps(_plain(shown), sort_keys=True).encode(), digest_size=16).digest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
