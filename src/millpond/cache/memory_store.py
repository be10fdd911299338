"""MemoryStore: what BlobStore keeps in a file, in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millpond.cache.blob_store import SMALLEST_LIMIT, check_limit
from millpond.cache.recent_rows import RecentRows
from millpond.errors import CacheError

MEMORY = ":memory:"
"""The path of a cache that has no file, as SQLite names it."""

_BYTES = 64 << 20  # 34,000 vectors of 384 floats


class MemoryStore:
    """Bytes by key, of at most ``max_bytes``, 64 MiB by default: the least recently used give way."""

    def __init__(self, *, max_bytes: int | None) -> None:
        check_limit(max_bytes, SMALLEST_LIMIT)
        self.path = Path(MEMORY)
        self.evicted = 0
        self.memory = 0  # beside the rows themselves
        self._pid = os.getpid()
        self._closed = False
        self._rows = RecentRows(_BYTES if max_bytes is None else max_bytes)

    def read(self, keys: Sequence[bytes]) -> tuple[list[tuple[Any, ...]], int]:
        """The rows (key, id, meta, checksum, value) of ``keys``, and how many are damaged: none."""
        self._check()
        return self._rows.find(keys), 0

    def write(self, values: Mapping[bytes, tuple[int, bytes | memoryview]]) -> None:
        """Store ``{key: (meta, value)}``; existing keys are replaced."""
        self._check()
        self.evicted += self._rows.keep([(key, 0, meta, 0, bytes(value)) for key, (meta, value) in values.items()])

    def size(self) -> tuple[int, int, int]:
        """Rows, their bytes, and bytes that are free for others: none."""
        self._check()
        return (*self._rows.size(), 0)

    def problems(self) -> list[str]:
        """Nothing is wrong with it."""
        self._check()
        return []

    def verify(self) -> Iterator[tuple[int, int]]:
        """The numbers of intact and damaged rows."""
        yield self.size()[0], 0

    def lengths(self) -> dict[int, int]:
        """Number of rows for each length of a value."""
        self._check()
        return self._rows.lengths()

    def clear(self) -> None:
        """Remove every row."""
        self._check()
        self._rows.clear()

    def close(self) -> None:
        """Forget the rows. Later calls raise, except ``close``."""
        self._closed = True
        self._rows.clear()

    def _check(self) -> None:
        if self._closed:
            raise CacheError("the cache in memory is closed; open it again")
        if self._pid != os.getpid():
            raise CacheError(
                f"the cache in memory was made by process {self._pid} and does not survive a fork into {os.getpid()}; "
                "make it again in the new process"
            )
