"""RowSample: some of the rows that were copied, with which the target is compared at the end."""

from __future__ import annotations

import random

import numpy as np

from millpond.ingest.pipeline.verify import is_stored
from millpond.ingest.record import Record
from millpond.ingest.sinks.batch import FloatArray, WriteBatch
from millpond.ingest.sinks.protocol import ReadsContent

_SAMPLED_ROWS = 256


class RowSample:
    """Rows of a copy, each with the same chance (algorithm R)."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._seen = 0
        self._rows: list[tuple[str, Record, dict[int, FloatArray]]] = []

    def offer(self, batch: WriteBatch) -> None:
        """Rows that the target should hold.

        Args:
            batch: The rows.
        """
        for index, (row_id, record) in enumerate(zip(batch.ids, batch.records, strict=True)):
            self._seen += 1
            place = len(self._rows) if len(self._rows) < _SAMPLED_ROWS else self._random.randrange(self._seen)
            if place < _SAMPLED_ROWS:
                vectors = {width: rows[index].copy() for width, rows in batch.vectors.items()}
                self._rows[place : place + 1] = [(row_id, record, vectors)]

    def compare(self, sink: ReadsContent) -> tuple[int, int]:
        """Compare the rows with those of a sink.

        Args:
            sink: The sink of the target.

        Returns:
            How many rows were looked for, and how many are not there with their text, metadata and vectors.
        """
        if not self._rows:
            return 0, 0
        widths = list(self._rows[0][2])
        rows = {row_id: (record, vectors) for row_id, record, vectors in self._rows}  # of one that came twice, the last
        batch = WriteBatch(
            records=[record for record, _ in rows.values()],
            ids=list(rows),
            vectors={width: np.stack([vectors[width] for _, vectors in rows.values()]) for width in widths},
        )
        stored = sink.read_rows(batch.ids, widths=widths)
        readable = {width for row in stored.values() for width in row.vectors}  # signs are no vectors
        wrong = sum(not is_stored(stored.get(row_id), batch, n, readable) for n, row_id in enumerate(batch.ids))
        return len(batch), wrong
