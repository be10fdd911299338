"""VectorCache: full-width vectors on disk, keyed by a hash of everything that determines them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from millpond.cache.blob_store import KEYS_PER_SELECT, BlobStore
from millpond.cache.errors import CacheFileError
from millpond.cache.memory_store import MEMORY, MemoryStore
from millpond.cache.sqlitefile import is_damage
from millpond.errors import CacheError, InvalidRequestError
from millpond.support.progress import draw_bar

logger = logging.getLogger(__name__)

KEY_BYTES = 32
_DAMAGED = (
    "%s is damaged: %d of %d vectors could not be read whole, and count as not found; the vectors that are computed "
    "instead replace them. If this happens again, delete the file"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheHits:
    """The result of :meth:`VectorCache.get`, in the order of the keys."""

    found: npt.NDArray[np.bool_]  # `[n]` bool: the key is in the cache
    rows: npt.NDArray[np.float32]  # `[n, width]` float32; zeros for a key that was not found
    tokens: npt.NDArray[np.int32]  # `[n]` int32, tokens of the text; 0 for a key that was not found
    truncated: npt.NDArray[np.bool_]  # `[n]` bool, the text was truncated; False for a key that was not found


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """Contents of a cache's file, and counters of one object since it was made."""

    rows: int  # vectors in the file
    # bytes of the file in use, the index included; `max_bytes` bounds them. Free pages, which the next vectors fill,
    # and the write-ahead log (16 MiB and one `put`, while open) are not counted.
    bytes: int
    hits: int  # keys that `get` found; a repeated key counts again
    misses: int  # keys that `get` did not find
    written: int  # vectors passed to `put`; a repeated key counts once
    evicted: int  # vectors removed, or not stored, because of `max_bytes`
    damaged: int = 0  # vectors in the file that `get` could not read whole, and counted as misses
    unwritten: int = 0  # vectors that `put` could not store
    write_error: str | None = None  # why the last of them could not be stored; None if all were
    memory: int = 0  # bytes of the vectors that this object holds in memory beside the file


@dataclass(frozen=True, kw_only=True)
class CacheCheck:
    """The result of :meth:`VectorCache.check`."""

    rows: int  # vectors that match their checksums
    damaged: int  # vectors that do not, or cannot be read; they count as not found, and are computed again
    problems: tuple[str, ...]  # what sqlite finds wrong with the file's structure, at most 20 lines

    @property
    def intact(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damaged and not self.problems


class VectorCache:
    """Vectors by key, in one file that threads and processes may share.

    Rows are float32 at full width with a checksum over key, vector and metadata. A row that does not match its checksum
    is never returned: its key counts as not found, the next ``put`` of the key replaces it, and the first one is
    reported by a warning. No text is stored, and a new file is readable by
    its owner only (0600). ``put`` is one transaction, committed on return: a crash of the process loses none of them, a
    power cut may lose the last ones. An engine commits vectors as they are computed: of an engine that is killed, those
    are missing that its threads were computing (a batch each), and at most ``max_batch_tokens / 64`` besides.

    A file that cannot be written (a full disk, no permission) makes ``put`` raise, and is counted by ``unwritten`` and
    ``write_error``; every ``put`` tries again. An engine goes on without storing. A file that is deleted or replaced
    while it is open is created, or opened, again.

    Vectors that are asked for a few at a time, as questions are, stay in memory, up to 16 MiB; ``put`` and ``clear`` of
    this object remove them there. Another process that clears the file, or deletes it, does not.

    With ``max_bytes``, the least recently used vectors are evicted for new ones. Uses are held in memory and written
    with the next ``put``, after 32768 of them, or by ``close``, so other processes see them late. An object without a
    limit records no uses.

    An empty cache has length 0 and is therefore false: test ``cache is not None``. After a fork this object raises in
    the child process, which must open the file again.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        """Open the cache at ``path``; create the file if it does not exist.

        Args:
            path: The file, on a local disk; sqlite keeps ``-wal`` and ``-shm`` files next to it while it is open.
                ``":memory:"`` for a cache of this object alone, without a file.
            max_bytes: Limit for the bytes of the file in use; None: no limit, and 64 MiB in memory.

        Raises:
            CacheError: ``path`` is no cache, is damaged, has a newer schema, cannot be opened, or its folder does not
                exist.
            InvalidRequestError: ``max_bytes`` is too small to hold anything.
        """
        self._max_bytes = max_bytes
        in_memory = os.fspath(path) == MEMORY
        self._file = MemoryStore(max_bytes=max_bytes) if in_memory else BlobStore(path, max_bytes=max_bytes)
        self._counters_lock = threading.Lock()
        self._counts = dict.fromkeys(("hits", "misses", "written", "damaged", "unwritten"), 0)
        self._write_error: str | None = None

    @staticmethod
    def key(namespace: str, text: str) -> bytes:
        """The key of a text.

        Args:
            namespace: Names everything else that determines the vector.
            text: The text.

        Returns:
            32 bytes of BLAKE2b over both.
        """
        return VectorCache.keys(namespace, [text])[0]

    @staticmethod
    def keys(namespace: str, texts: Sequence[str]) -> list[bytes]:
        """:meth:`key` for each text; the namespace is hashed once.

        Args:
            namespace: Names everything else that determines the vectors.
            texts: The texts.

        Returns:
            A key of 32 bytes for each text, in order.
        """
        name = namespace.encode("utf-8", "surrogatepass")
        # The length comes first, so that ("a", "bc") and ("ab", "c") are different bytes.
        prepared = blake2b(len(name).to_bytes(8, "little") + name, digest_size=KEY_BYTES)
        keys = []
        for text in texts:
            hasher = prepared.copy()
            hasher.update(text.encode("utf-8", "surrogatepass"))
            keys.append(hasher.digest())
        return keys

    def get(self, keys: Sequence[bytes], *, width: int, out: npt.NDArray[np.float32] | None = None) -> CacheHits:
        """Look up ``n`` keys, which may repeat, as vectors of ``width`` floats.

        A row that does not match its checksum is not found.

        Args:
            keys: The keys.
            width: Floats of each vector.
            out: ``[n, width]`` float32 to write the vectors to, instead of a new array; rows of keys that are not found
                stay as they are.

        Returns:
            The vectors ``[n, width]``, and for each key whether it was found, its tokens and whether its text was cut.

        Raises:
            CacheError: An intact row is of another width, or the file cannot be read.
        """
        count = len(keys)
        found = np.zeros(count, dtype=np.bool_)
        rows = np.zeros((count, width), dtype=np.float32) if out is None else out  # [n, width]
        metas = np.zeros(count, dtype=np.int64)
        row_of = {key: row for row, key in enumerate(keys)}
        distinct = sorted(row_of)  # neighbours in sqlite's index share pages
        damaged = 0
        for start in range(0, len(distinct), KEYS_PER_SELECT):
            stored, broken = self._file.read(distinct[start : start + KEYS_PER_SELECT])
            damaged += broken
            if not stored:
                continue
            found_keys, _, found_metas, _, values = zip(*stored, strict=True)
            lengths = set(map(len, values)) - {width * 4}
            if lengths:
                raise CacheError(
                    f"{self.path} holds {min(lengths)} bytes for a key and width={width} needs {width * 4}; "
                    "keys of one namespace must have one width: fix the namespace, or delete the file"
                )
            targets = [row_of[key] for key in found_keys]
            rows[targets] = np.frombuffer(b"".join(values), dtype="<f4").reshape(len(targets), width)
            metas[targets] = found_metas
            found[targets] = True
        if len(row_of) < count:
            source = np.fromiter(map(row_of.__getitem__, keys), dtype=np.intp, count=count)
            rows = rows[source]
            if out is not None:
                out[:] = rows
            found, metas = found[source], metas[source]
        hits = int(found.sum())
        with self._counters_lock:
            level = logging.DEBUG if self._counts["damaged"] else logging.WARNING
            for name, number in (("hits", hits), ("misses", count - hits), ("damaged", damaged)):
                self._counts[name] += number
        if damaged:
            logger.log(level, _DAMAGED, self.path, damaged, len(distinct))
        tokens, truncated = (metas >> 1).astype(np.int32), (metas & 1).astype(np.bool_)
        return CacheHits(found=found, rows=rows, tokens=tokens, truncated=truncated)

    def put(
        self, keys: Sequence[bytes], rows: npt.ArrayLike, *, tokens: npt.ArrayLike, truncated: npt.ArrayLike
    ) -> None:
        """Store one vector per key in one transaction, committed on return; existing keys are replaced.

        Args:
            keys: ``n`` keys; of equal keys the last one counts.
            rows: ``[n, width]``, finite; stored as float32.
            tokens: ``[n]``, tokens of each text.
            truncated: ``[n]``, whether each text was truncated.

        Raises:
            InvalidRequestError: The lengths differ, a key is not 32 bytes, or a row holds a NaN or an infinity.
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
        buffer, row_bytes = matrix.reshape(-1).view(np.uint8).data, matrix.shape[1] * 4
        values = {
            key: (meta, buffer[index * row_bytes : (index + 1) * row_bytes])
            for index, (key, meta) in enumerate(zip(keys, metas.tolist(), strict=True))
        }
        if values:
            try:
                self._file.write(values)
            except CacheError as error:
                with self._counters_lock:
                    self._counts["unwritten"] += len(values)
                    self._write_error = str(error)
                raise
        with self._counters_lock:
            self._counts["written"] += len(values)

    def clear(self) -> None:
        """Remove every vector and give the space back to the disk."""
        self._file.clear()

    def stats(self) -> CacheStats:
        """Contents and counters; counting the rows reads about 10 bytes of each.

        Returns:
            What the file holds, and what this object did since it was made.

        Raises:
            CacheError: The file is closed or cannot be read.
        """
        rows, size, _ = self._file.size()
        with self._counters_lock:
            evicted, error = self._file.evicted, self._write_error
            memory = self._file.memory
            return CacheStats(rows=rows, bytes=size, evicted=evicted, write_error=error, memory=memory, **self._counts)

    def check(self, *, show_progress: bool = False) -> CacheCheck:
        """Read the whole file: its structure, and every vector against its checksum.

        Other threads and processes may use the file meanwhile. Memory does not depend on its size.

        Args:
            show_progress: Draw a progress bar, if standard error is a terminal or this is a notebook.

        Returns:
            What was found. A damaged vector counts as a miss and is recomputed; if ``problems`` are reported, delete
            the file, and all of them are.

        Raises:
            CacheError: The file cannot be read at all.
        """
        problems, rows, damaged = [], 0, 0
        try:
            problems = self._file.problems()
        except CacheFileError as error:
            problems = [_damage_of(error)]
        try:
            with draw_bar(show=show_progress, unit=" vectors") as bar:
                for intact, broken in self._file.verify():
                    rows, damaged = rows + intact, damaged + broken
                    bar.update(intact + broken)
        except CacheFileError as error:
            problems.append(f"not every vector could be counted: {_damage_of(error)}")
        return CacheCheck(rows=rows, damaged=damaged, problems=tuple(problems))

    def widths(self) -> dict[int, int]:
        """Count the vectors by their width; reads a page of each vector.

        Returns:
            For each number of floats, the number of vectors that have it.

        Raises:
            CacheError: The file is closed or cannot be read.
        """
        lengths = self._file.lengths()
        return {length // 4: count for length, count in lengths.items() if isinstance(length, int)}

    def free_bytes(self) -> int:
        """Bytes of the file that are not in use; the next vectors fill them."""
        return self._file.size()[2]

    def close(self) -> None:
        """Close the file. Later calls raise, except ``close``."""
        self._file.close()

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def unwritten(self) -> int:
        """Vectors that ``put`` could not store since this object was made: they are computed again next time."""
        return self._counts["unwritten"]

    @property
    def write_error(self) -> str | None:
        """Why the last of the unwritten vectors could not be stored; None if all were."""
        return self._write_error

    def __len__(self) -> int:
        return self._file.size()[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"VectorCache({str(self.path)!r}, max_bytes={self._max_bytes})"


def _damage_of(error: CacheFileError) -> str:
    """What is wrong with the file's content; another error is raised."""
    if not is_damage(error):
        raise error
    return str(error)
