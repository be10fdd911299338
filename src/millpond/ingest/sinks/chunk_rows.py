"""The rows of a record's chunks, found by their ids, since no database lists the rows of a record."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from millpond.ingest.record import point_id

# Chunks of a record that are looked for at a time, to delete them all.
_CHUNKS = 64


def chunk_rows(fetch: Callable[[Sequence[str]], Container[str]], first: Mapping[str, int]) -> list[str]:
    """Row ids of records' chunks from a number on, the last ones first, until one is absent.

    Args:
        fetch: Returns those of some row ids that exist.
        first: For each record id, the number of the first chunk to look for.

    Returns:
        A list of row ids.
    """
    found: list[list[str]] = []
    pending = dict(first)
    window = 1  # most records have no other chunk
    while pending:
        rows = {
            record_id: [point_id(record_id, number) for number in range(start, start + window)]
            for record_id, start in pending.items()
        }
        stored = fetch([row_id for row_ids in rows.values() for row_id in row_ids])
        for row_ids in rows.values():
            found.append([row_id for row_id in reversed(row_ids) if row_id in stored])
        pending = {
            record_id: pending[record_id] + window
            for record_id, row_ids in rows.items()
            if any(row_id in stored for row_id in row_ids)
        }
        window = _CHUNKS
    return [row_id for row_ids in reversed(found) for row_id in row_ids]
