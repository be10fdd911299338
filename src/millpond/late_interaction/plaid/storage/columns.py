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
    """Byte strings in one array."""

    data: npt.NDArray[np.uint8]  # uint8 `[bytes]`
    offsets: npt.NDArray[np.int64]  # int64 `[n + 1]`; string `i` is `data[offsets[i]:offsets[i + 1]]`

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
    """Ids of documents, and where each is found."""

    strings: ByteStrings  # the ids in UTF-8
    hashes: npt.NDArray[np.uint64]  # uint64 `[n]`, ascending hashes of the ids
    order: npt.NDArray[np.uint32]  # uint32 `[n]`: the document of each hash

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
    """Documents in arrays."""

    offsets: npt.NDArray[np.int64]  # int64 `[documents + 1]` into the token rows
    # float16 `[tokens]`: of `rows` or of `residuals`; `None` if the codec has none
    scales: npt.NDArray[np.float16] | None
    # `[tokens, columns]` as the codec packs them; `None` where residuals stand for them
    rows: npt.NDArray[Any] | None
    # uint16 `[tokens]`, the centroid of each row; `None` before the centroids were trained
    codes: npt.NDArray[np.uint16] | None
    residuals: npt.NDArray[np.uint8] | None  # uint8 `[tokens, width]` of `Encoded`
    ids: Ids  # the ids
    texts: ByteStrings  # the texts in UTF-8
    metadata: ByteStrings  # JSON objects; no bytes for an empty one

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
