"""Looks into a database after a run: are the rows there, and are they right?"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from millpond.ingest.pipeline.comparison import ExpectedContent, has_content, read_rows
from millpond.ingest.pipeline.delivery import RetryingWriter
from millpond.ingest.pipeline.embedder import EmbeddedRecords, PlannedRecord, RecordEmbedder, record_key
from millpond.ingest.pipeline.journal import CollectionEntries, JournalEntry
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.protocol import Reads, StoredRow
from millpond.ingest.telemetry.report import Verification

logger = logging.getLogger(__name__)

_SAMPLED_RECORDS = 256
_PROBED_RECORDS = 128
# Of a collection with more rows than this not all ids are read before a run, but those of about so many records.
_SCANNED_ROWS = 100_000
_SAMPLED_ENTRIES = 1024
_ROWS = 512
# Of a stored vector and the engine's: half precision has 0.99999, a byte per dimension 0.999.
_LEAST_COSINE = 0.99


class RecordSample:
    """Some records of a run, each with the same chance (algorithm R). Any thread may use it."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._seen = 0
        self._kept: dict[str, Record] = {}  # by their keys

    @property
    def records(self) -> list[Record]:
        """The sample."""
        return list(self._kept.values())

    def offer(self, records: Iterable[Record]) -> None:
        """Records that the collection should hold. A later one with the same id takes the place of an earlier one."""
        with self._lock:
            for record in records:
                self._seen += 1
                key = record_key(record)
                if key not in self._kept and len(self._kept) >= _SAMPLED_RECORDS:
                    if self._random.randrange(self._seen) >= _SAMPLED_RECORDS:
                        continue
                    del self._kept[self._random.choice(list(self._kept))]
                self._kept[key] = record

    def drop(self, key: str) -> None:
        """A record that the collection does not hold after all."""
        with self._lock:
            self._kept.pop(key, None)


def forget_missing(sink: Reads, entries: CollectionEntries) -> int:
    """Remove the entries of records that the collection lacks: it was deleted, or restored from a copy.

    The collection is trusted if it has as many rows as the entries say, and those of the first ids, the last ones and
    some others (of a collection that is not large: of all); else every row is looked for by its id.
    """
    expected = entries.rows()
    if not expected:
        return 0
    stored = sink.count()
    if stored <= _SCANNED_ROWS:
        missing = _forget({row_id for row_id, _ in sink.scan()}.intersection, entries)
    elif stored < expected or _missing(sink.fetch, [*entries.ends(_PROBED_RECORDS), *entries.some(_SAMPLED_ENTRIES)]):
        missing = _forget(sink.fetch, entries)
    else:
        missing = 0
    if missing:
        logger.warning(
            "the collection lacks %d of the %d rows that the journal says it holds; they are written again",
            missing,
            expected,
        )
    return missing


def verify(
    sink: Reads,
    entries: CollectionEntries,
    sample: Sequence[PlannedRecord],
    embedder: RecordEmbedder,
    requests: RetryingWriter,
    content: ExpectedContent | None,
) -> Verification:
    """Compare every row of the journal with its record, and the vectors of a sample with the engine's.

    Entries of missing rows and of different ones are removed, so that the next run writes them.
    """
    expected = entries.rows()
    missing, compared, different = _compare_all(sink, entries, requests, content)
    sampled = 0
    # One call: the sample is no larger than a batch.
    for embedded in embedder.complete(embedder.submit(sample)) if sample else ():
        if not isinstance(embedded, EmbeddedRecords):
            continue
        rows, batch = embedded.batch.ids, embedded.batch
        owners = [record.key for record in embedded.records for _ in record.chunks]
        stored = read_rows(sink, requests, rows, list(batch.vectors))
        # Some types of vectors cannot be read back: then no row has them.
        readable = {width for row in stored.values() for width in row.vectors}
        for index, row_id in enumerate(rows):
            sampled += 1
            if not is_stored(stored.get(row_id), batch, index, readable):
                different.add(owners[index])
    if different:
        entries.remove(different)
    return Verification(
        rows=requests.send(sink.count),
        expected=expected,
        missing=missing,
        compared=compared,
        sampled=sampled,
        different=len(different),
    )


def _compare_all(
    sink: Reads, entries: CollectionEntries, requests: RetryingWriter, content: ExpectedContent | None
) -> tuple[int, int, set[str]]:
    """How many rows are missing and how many were compared, and the records of which one is different."""
    missing = compared = 0
    different: set[str] = set()
    for page in entries.pages():
        for start in range(0, len(page), _ROWS):
            part = page[start : start + _ROWS]
            owners = {point_id(entry.id, chunk): entry.id for entry in part for chunk in range(entry.chunks)}
            stored = read_rows(sink, requests, list(owners))
            lacking = Counter(owners[row_id] for row_id in owners.keys() - stored.keys())
            entries.remove(lacking)
            missing += sum(lacking.values())
            compared += sum(row.text is not None for row in stored.values())
            if content is not None:
                different |= content.different(part, stored) - lacking.keys()
    return missing, compared, different


def is_stored(row: StoredRow | None, batch: WriteBatch, index: int, readable: Iterable[int]) -> bool:
    """Whether a stored row has the text, metadata and vectors of row ``index`` of a batch."""
    if row is None or not has_content(row, batch.records[index]):
        return False
    for width in readable:
        computed, stored = batch.vectors[width][index], row.vectors.get(width)
        if stored is None or stored.shape != computed.shape or not (length := float(np.linalg.norm(stored))) > 0:
            return False
        if not float(stored @ computed) / length >= _LEAST_COSINE:
            return False
    return True


def _forget(find: Callable[[list[str]], Iterable[str]], entries: CollectionEntries) -> int:
    """Remove the entries of which ``find`` lacks a row; returns how many rows it lacks."""
    missing = 0
    for page in entries.pages():
        for start in range(0, len(page), _ROWS):
            lacking = _missing(find, page[start : start + _ROWS])
            if lacking:
                entries.remove(lacking)
                missing += sum(lacking.values())
    return missing


def _missing(find: Callable[[list[str]], Iterable[str]], entries: Sequence[JournalEntry]) -> dict[str, int]:
    """Records of which rows are missing, and how many."""
    owner = {point_id(entry.id, chunk): entry.id for entry in entries for chunk in range(entry.chunks)}
    return Counter(owner[row_id] for row_id in owner.keys() - set(find(list(owner))))
