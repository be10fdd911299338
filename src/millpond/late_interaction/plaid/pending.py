"""Pending documents: what an ``add`` has encoded and not yet committed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs.rows import Codec
from millpond.late_interaction.index.documents import Documents
from millpond.late_interaction.index.settings import IndexSettings
from millpond.late_interaction.plaid.storage.columns import ByteStrings, Columns, Ids, id_hashes, metadata_bytes


class PendingDocuments:
    """Documents whose ids are all different, with packed rows."""

    def __init__(self, codec: Codec) -> None:
        self.ids: list[bytes] = []
        self.tokens = 0
        self.text_bytes = 0
        self.settings: IndexSettings | None = None
        self._codec = codec
        self._texts: list[bytes] = []
        self._metadata: list[bytes] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._packed: list[tuple[npt.NDArray[Any], npt.NDArray[np.float16] | None]] = []

    def __len__(self) -> int:
        return len(self.ids)

    def fits(self, stored: IndexSettings | None) -> bool:
        """Whether the rows of an index were made as these are; ``None`` is an index without rows."""
        mine = self.settings
        if mine is None or stored is None:
            return True
        if (mine.native, mine.pool_factor) != (stored.native, stored.pool_factor):
            return False
        if mine.projection is None or stored.projection is None:
            return mine.projection is stored.projection
        return np.array_equal(mine.projection.matrix, stored.projection.matrix)

    def add(self, documents: Documents, settings: IndexSettings | None) -> None:
        """Keep documents, and how texts became their rows (``None`` if they have none)."""
        self.settings = self.settings or settings
        texts = [text.encode() for text in documents.texts]
        metadata = [metadata_bytes(value) for value in documents.metadata]
        self.ids += [id.encode() for id in documents.ids]
        self._texts += texts
        self._metadata += metadata
        self._lengths.append(documents.embeddings.lengths)
        if len(documents.embeddings.flat):
            self._packed.append(self._codec.pack(documents.embeddings.flat))
        self.tokens += len(documents.embeddings.flat)
        self.text_bytes += sum(map(len, texts)) + sum(map(len, metadata))

    def columns(self) -> Columns:
        """The documents as arrays."""
        none = self._codec.pack(np.empty((0, 0), dtype=np.float32))
        packed = self._packed or [none]
        return Columns(
            offsets=np.concatenate(([0], np.cumsum(np.concatenate(self._lengths)))).astype(np.int64),
            scales=np.concatenate([scales for _, scales in packed if scales is not None])
            if self._codec.scaled
            else None,
            rows=np.concatenate([rows for rows, _ in packed]),
            codes=None,
            residuals=None,
            ids=Ids.of(ByteStrings.of(self.ids), id_hashes(self.ids)),
            texts=ByteStrings.of(self._texts),
            metadata=ByteStrings.of(self._metadata),
        )
