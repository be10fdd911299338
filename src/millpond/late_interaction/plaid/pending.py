"""Pending documents: what an ``add`` has encoded and not yet committed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.index import Documents
from millpond.late_interaction.plaid import int8_rows
from millpond.late_interaction.plaid.columns import ByteStrings, Columns, Ids, id_hashes


class PendingDocuments:
    """Documents whose ids are all different, with int8 rows."""

    def __init__(self) -> None:
        self.ids: list[bytes] = []
        self.tokens = 0
        self.text_bytes = 0
        self._texts: list[bytes] = []
        self._metadata: list[bytes] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._rows: list[tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]] = []

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def columns_of_a_row(self) -> int:
        """Width of the rows."""
        return int(self._rows[0][0].shape[1])

    def add(self, documents: Documents) -> None:
        """Keep documents."""
        texts = [text.encode() for text in documents.texts]
        metadata = [_json(value) for value in documents.metadata]
        self.ids += [id.encode() for id in documents.ids]
        self._texts += texts
        self._metadata += metadata
        self._lengths.append(documents.embeddings.lengths)
        self._rows.append(int8_rows.pack(documents.embeddings.flat))
        self.tokens += len(documents.embeddings.flat)
        self.text_bytes += sum(map(len, texts)) + sum(map(len, metadata))

    def columns(self) -> Columns:
        """The documents as arrays."""
        lengths = np.concatenate(self._lengths)
        return Columns(
            offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            scales=np.concatenate([scales for _, scales in self._rows]),
            rows=np.concatenate([rows for rows, _ in self._rows]),
            codes=None,
            residuals=None,
            ids=Ids.of(ByteStrings.of(self.ids), id_hashes(self.ids)),
            texts=ByteStrings.of(self._texts),
            metadata=ByteStrings.of(self._metadata),
        )


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() if value else b""
