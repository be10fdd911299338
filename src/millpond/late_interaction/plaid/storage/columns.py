"""Columns: the documents of a segment as arrays, in memory before they are written and mapped afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from millpond.support.cached_property import cached_property


@dataclass(frozen=True, kw_only=True, eq=False)
class ByteStrings:
    """Byte strings in one array.

    Attributes:
        data: uint8 ``[bytes]``.
        offsets: int64 ``[n + 1]``; string ``i`` is ``data[offsets[i]:offsets[i + 1]]``.
    """

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> Self:
        """Concatenate strings."""
        offsets = np.zeros(len(strings) + 1, dtype=np.int64)
        np.cumsum([len(string) for string in strings], out=offsets[1:])
        return cls(data=np.frombuffer(b"".join(strings), dtype=np.uint8), offsets=offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        return self.data[self.offsets[index] : self.offsets[index + 1]].tobytes()


@dataclass(frozen=True, kw_only=True, eq=False)
class Ids:
    """Ids of documents, and where each is found.

    Attributes:
        strings: The ids in UTF-8.
        hashes: uint64 ``[n]``, ascending hashes of the ids.
        order: uint32 ``[n]``: the document of each hash.
    """

    strings: ByteStrings
    hashes: npt.NDArray[np.uint64]
    order: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, strings: ByteStrings, hashes: npt.NDArray[np.uint64]) -> Self:
        """With the hash of each id, in the order of the ids."""
        order = np.argsort(hashes, kind="stable")
        return cls(strings=strings, hashes=hashes[order], order=order.astype(np.uint32))

    def __len__(self) -> int:
        return len(self.strings)

    @cached_property
    def hash_of_each(self) -> npt.NDArray[np.uint64]:
        """uint64 ``[n]``: the hash of each document's id."""
        hashes = np.empty(len(self), dtype=np.uint64)
        hashes[self.order] = self.hashes
        return hashes

    def find(self, ids: Sequence[bytes], hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The document of each id, -1 where there is none.

        Args:
            ids: Ids in UTF-8.
            hashes: :func:`id_hashes` of them.
        """
        found = np.full(len(ids), -1, dtype=np.int64)
        first = np.searchsorted(self.hashes, hashes, side="left")
        after = np.searchsorted(self.hashes, hashes, side="right")
        for index in np.flatnonzero(after > first).tolist():
            for place in range(first[index], after[index]):  # more than one only where two ids have equal hashes
                document = int(self.order[place])
                if self.strings[document] == ids[index]:
                    found[index] = document
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """Documents in arrays.

    Attributes:
        offsets: int64 ``[documents + 1]`` into the token rows.
        scales: float16 ``[tokens]``: of ``rows`` or of ``residuals``; ``None`` if the codec has none.
        rows: ``[tokens, columns]`` as the codec packs them; ``None`` where residuals stand for them.
        codes: uint16 ``[tokens]``, the centroid of each row; ``None`` before the centroids were trained.
        residuals: uint8 ``[tokens, width]`` of :class:`millpond.late_interaction.codecs.residual.Encoded`.
        ids: The ids.
        texts: The texts in UTF-8.
        metadata: JSON objects; no bytes for an empty one.
    """

    offsets: npt.NDArray[np.int64]
    scales: npt.NDArray[np.float16] | None
    rows: npt.NDArray[Any] | None
    codes: npt.NDArray[np.uint16] | None
    residuals: npt.NDArray[np.uint8] | None
    ids: Ids
    texts: ByteStrings
    metadata: ByteStrings

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def token_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that have a row for each token, by name."""
        arrays = {"codes": self.codes, "scales": self.scales, "rows": self.rows, "residuals": self.residuals}
        return {name: array for name, array in arrays.items() if array is not None}


def metadata_bytes(metadata: object) -> bytes:
    """Metadata as it is stored: JSON, or no bytes if it is empty."""
    return json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode() if metadata else b""


def id_hashes(ids: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """uint64 ``[n]``: a hash of each id, the same in every process."""
    digests = b"".join(blake2b(id, digest_size=8).digest() for id in ids)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
