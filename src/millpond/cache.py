"""VectorCache: full-width vectors on disk, by the hash of all that decides them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from millpond.blob_store import KEYS_PER_SELECT, SMALLEST_LIMIT, RowFile
from millpond.errors import CacheError, InvalidRequestError

KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheHits:
    """What :meth:`VectorCache.get` found, in the order of the keys.

    Attributes:
        found: ``[n]`` bool.
        rows: ``[n, width]`` float32; zeros where nothing was found.
        tokens: ``[n]`` int32, tokens of the text; 0 where nothing was found.
        truncated: ``[n]`` bool, the text was cut; False where nothing was found.
    """

    found: npt.NDArray[np.bool_]
    rows: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    truncated: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """A cache's contents, and what went through one object since it was made.

    Attributes:
        rows: Vectors in the file.
        bytes: Bytes of the file that hold something, the index included: what ``max_bytes`` bounds. Not counted are
            free pages, which the next vectors fill, and the write-ahead log (16 MiB and one ``put``, while open).
        hits: Keys that ``get`` found; a repeated key counts again.
        misses: Keys that it did not.
        written: Vectors that ``put`` was given, a repeated key once.
        evicted: Vectors removed, or not kept, for ``max_bytes``.
    """

    rows: int
    bytes: int
    hits: int
    misses: int
    written: int
    evicted: int


class VectorCache:
    """Vectors by key, in one file that threads and processes may share.

    Rows are float32 at full width with a checksum over key, vector and metadata: what cannot be shown to be the vector
    that was stored is a :class:`~millpond.errors.CacheError`, never a result. No text is stored, and only its owner can
    read a file made here (0600). ``put`` is one transaction, committed on return; the last ones before a power cut
    may be lost, those before a crash of the process are not.

    With ``max_bytes`` the least recently used vectors make room for new ones. Uses are held in memory and written with
    the next ``put``, after 32768 of them, or by ``close``: other processes see them late. Objects without a limit
    write none.

    An empty cache has length 0 and is false therefore: ask ``cache is not None``. After a fork the child has to open
    a cache of its own; this object raises there.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        """Open the cache at ``path``; where there is none, make it and its folders.

        Args:
            path: The file, on a local disk; sqlite keeps ``-wal`` and ``-shm`` beside it while it is open.
            max_bytes: Most bytes of the file to use; None for no limit.

        Raises:
            CacheError: ``path`` is something else, damaged or of a newer schema, or cannot be opened.
            InvalidRequestError: ``max_bytes`` is too small to hold anything.
        """
        if max_bytes is not None and max_bytes < SMALLEST_LIMIT:
            raise InvalidRequestError(
                f"max_bytes={max_bytes} is less than a cache can keep to ({SMALLEST_LIMIT}); give it more, or None"
            )
        self._max_bytes = max_bytes
        try:
            place = Path(path).expanduser().absolute()
        except RuntimeError as error:  # ~somebody
            raise CacheError(f"{os.fspath(path)!r} is no path here ({error}); write it out") from error
        self._file = RowFile(place, max_bytes=max_bytes)
        self._counting = threading.Lock()
        self._hits = self._misses = self._written = 0

    @staticmethod
    def key(namespace: str, text: str) -> bytes:
        """The key of ``text`` under ``namespace``, which is all else that decides the vector: 32 bytes of BLAKE2b."""
        return VectorCache.keys(namespace, [text])[0]

    @staticmethod
    def keys(namespace: str, texts: Sequence[str]) -> list[bytes]:
        """:meth:`key` of each text, the namespace hashed once."""
        name = namespace.encode("utf-8", "surrogatepass")
        # Its length goes first, so that ("a", "bc") and ("ab", "c") are different bytes.
        prepared = blake2b(len(name).to_bytes(8, "little") + name, digest_size=KEY_BYTES)
        keys = []
        for text in texts:
            hasher = prepared.copy()
            hasher.update(text.encode("utf-8", "surrogatepass"))
            keys.append(hasher.digest())
        return keys

    def get(self, keys: Sequence[bytes], *, width: int) -> CacheHits:
        """Look up ``n`` keys, repeats among them or not, as vectors of ``width`` floats.

        Raises:
            CacheError: A row is damaged or of another width, or the file cannot be read.
        """
        count = len(keys)
        found = np.zeros(count, dtype=np.bool_)
        rows = np.zeros((count, width), dtype=np.float32)  # [n, width]
        metas = np.zeros(count, dtype=np.int64)
        place = {key: index for index, key in enumerate(keys)}
        distinct = sorted(place)  # neighbours in the index share its pages
        for start in range(0, len(distinct), KEYS_PER_SELECT):
            part = self._file.read(distinct[start : start + KEYS_PER_SELECT])
            lengths = set(map(len, part.values)) - {width * 4}
            if lengths:
                raise CacheError(
                    f"{self.path} holds {min(lengths)} bytes for a key and width={width} needs {width * 4}; "
                    "keys of one namespace must have one width: fix the namespace, or delete the file"
                )
            at = [place[key] for key in part.keys]
            rows[at] = np.frombuffer(b"".join(part.values), dtype="<f4").reshape(len(at), width)
            metas[at] = part.metas
            found[at] = True
        if len(place) < count:
            source = np.fromiter(map(place.__getitem__, keys), dtype=np.intp, count=count)
            found, rows, metas = found[source], rows[source], metas[source]
        hits = int(found.sum())
        with self._counting:
            self._hits += hits
            self._misses += count - hits
        return CacheHits(
            found=found, rows=rows, tokens=(metas >> 1).astype(np.int32), truncated=(metas & 1).astype(np.bool_)
        )

    def put(
        self, keys: Sequence[bytes], rows: npt.ArrayLike, *, tokens: npt.ArrayLike, truncated: npt.ArrayLike
    ) -> None:
        """Store one vector per key, in place of what the key had, in one transaction that is committed on return.

        Args:
            keys: ``n`` keys; among equal ones the last counts.
            rows: ``[n, width]``, finite; stored as float32.
            tokens: ``[n]``, tokens of each text.
            truncated: ``[n]``, whether each text was cut.

        Raises:
            InvalidRequestError: The lengths differ, a key is none, or a row holds a NaN or an infinity.
            CacheError: The file cannot be written.
        """
        matrix = np.ascontiguousarray(rows, dtype="<f4")
        metas = np.asarray(tokens, dtype=np.int64) << 1 | np.asarray(truncated, dtype=np.bool_)
        if matrix.ndim != 2 or metas.ndim != 1 or not len(keys) == len(matrix) == len(metas):
            raise InvalidRequestError(
                f"{len(keys)} keys, rows {matrix.shape} and tokens/truncated {metas.shape} do not fit together; "
                "pass n keys, rows [n, width], tokens [n] and truncated [n]"
            )
        for index, key in enumerate(keys):
            if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                raise InvalidRequestError(f"keys[{index}]={key!r} is not {KEY_BYTES} bytes; use VectorCache.key")
        finite = np.isfinite(matrix).all(axis=1)
        if not finite.all():
            raise InvalidRequestError(
                f"rows[{int(finite.argmin())}] holds a NaN or an infinity, which a cache would give back for ever; "
                "put finite float32 rows"
            )
        if len(metas) and not 0 <= metas.min() <= metas.max() < 1 << 32:
            raise InvalidRequestError(
                f"tokens={int(metas.min()) >> 1} to {int(metas.max()) >> 1} must be 0 to {2**31 - 1}"
            )
        flat, step = matrix.reshape(-1).view(np.uint8).data, matrix.shape[1] * 4
        values = {
            key: (meta, flat[index * step : (index + 1) * step])
            for index, (key, meta) in enumerate(zip(keys, metas.tolist(), strict=True))
        }
        if values:
            self._file.write(values)
        with self._counting:
            self._written += len(values)

    def clear(self) -> None:
        """Remove every vector and give the space back to the disk."""
        self._file.clear()

    def stats(self) -> CacheStats:
        """Contents and counters; the rows are counted by reading some 10 bytes of each."""
        rows, size = self._file.count(), self._file.bytes_in_use()
        with self._counting:
            return CacheStats(
                rows=rows,
                bytes=size,
                hits=self._hits,
                misses=self._misses,
                written=self._written,
                evicted=self._file.evicted,
            )

    def close(self) -> None:
        """Close the file; later calls raise, but for another ``close``."""
        self._file.close()

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def __len__(self) -> int:
        return self._file.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"VectorCache({str(self.path)!r}, max_bytes={self._max_bytes})"
