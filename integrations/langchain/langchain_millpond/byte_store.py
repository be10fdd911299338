"""MillpondByteStore: LangChain's byte store in the file format of millpond's vector cache."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from langchain_core.runnables.config import run_in_executor
from langchain_core.stores import BaseStore

from millpond.cache.blob_store import KEYS_PER_SELECT, BlobStore
from millpond.cache.vector_cache import KEY_BYTES
from millpond.errors import InvalidRequestError

logger = logging.getLogger(__name__)

# A stored key is the mark, the text in UTF-8, and the end byte if there would be as many bytes as in a vector's key.
# No byte of UTF-8 is 0xFF. So the file may hold the vectors of an engine as well, and no key of one is the other's.
_MARK, _END = b"bytes:", b"\xff"
_MAX_ROW_BYTES = 1_000_000_000 - 1024  # sqlite's limit, less than which a row's other columns take


class MillpondByteStore(BaseStore[str, bytes]):
    """Bytes by key, in one file that threads and processes may share.

    For ``CacheBackedEmbeddings``, ``ParentDocumentRetriever`` and whatever else takes a ``ByteStore``. ``mset`` is one
    transaction, committed on return: a crash of the process loses nothing, a power cut may lose the last calls. Every
    value has a checksum: a damaged one counts as not found, and the first one is reported by a warning. Keys and values
    are stored as they are, in a file that is readable by its owner only (0600); what was deleted is overwritten by the
    next values.

    The file has the format of the vector cache (``MillpondEmbeddings(cache=...)``). Both may use the same file, without
    seeing each other's entries; ``millpond cache check``, ``repair`` and ``stats`` work on it and count both.

    The asynchronous methods use a thread of the event loop's pool, since the file is read and written by system calls.
    A pickled or copied store opens the same file again. After a fork, the child process must open the file itself.

    Attributes:
        path: The file.
        max_bytes: Limit for the bytes of the file in use; the least recently used values are evicted for new ones.
            None: no limit, nothing is ever evicted.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        """Open the store at ``path``; create the file if it does not exist.

        Args:
            path: The file, on a local disk; sqlite keeps ``-wal`` and ``-shm`` files next to it while it is open.
            max_bytes: Limit for the bytes of the file in use; None: no limit.

        Raises:
            CacheError: ``path`` is none of these files, is damaged, has a newer schema, cannot be opened, or its folder
                does not exist.
            InvalidRequestError: ``max_bytes`` is too small to hold anything.
        """
        self._blobs = BlobStore(path, max_bytes=max_bytes)
        self.path: Path = self._blobs.path
        self.max_bytes = max_bytes
        self._damage_reported = False

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key; None for a key without one, and for one whose value is damaged.

        Raises:
            TypeError: ``keys`` is a bare str.
            InvalidRequestError: A key is not a str.
            CacheError: The file cannot be read.
        """
        stored = _stored_keys(keys)
        distinct = sorted(set(stored))
        found: dict[bytes, bytes] = {}
        damaged = 0
        for start in range(0, len(distinct), KEYS_PER_SELECT):
            part = distinct[start : start + KEYS_PER_SELECT]
            blobs = self._blobs.read(part)
            # A page that cannot be read fails the query as a whole, so each key is looked up by itself.
            whole = blobs.damaged == len(part) > 1
            for read in (self._blobs.read([key]) for key in part) if whole else (blobs,):
                found.update(zip(read.keys, read.values, strict=True))
                damaged += read.damaged
        if damaged:
            level = logging.DEBUG if self._damage_reported else logging.WARNING
            self._damage_reported = True
            logger.log(
                level,
                "%s is damaged: %d of %d values could not be read whole, and count as not found; to keep the others: "
                "millpond cache repair %s",
                self.path,
                damaged,
                len(distinct),
                self.path,
            )
        return [found.get(key) for key in stored]

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        """Store each value in one transaction, committed on return; of equal keys the last one counts.

        Raises:
            InvalidRequestError: A key is not a str, a value is not bytes, or is larger than the store can keep; nothing
                is stored.
            CacheError: The file cannot be written; nothing is stored.
        """
        values = {}
        for key, value in key_value_pairs:
            stored = _stored_key(key)
            self._check_value(key, value, len(stored))
            values[stored] = (0, value)
        if values:
            self._blobs.write(values)

    def mdelete(self, keys: Sequence[str]) -> None:
        """Remove the keys with their values in one transaction; keys without a value are skipped.

        The file does not shrink: the next values fill the space.

        Raises:
            TypeError: ``keys`` is a bare str.
            InvalidRequestError: A key is not a str.
            CacheError: The file cannot be written; nothing is removed.
        """
        distinct = sorted(set(_stored_keys(keys)))
        if distinct:
            self._blobs.delete(distinct)

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """The keys that begin with ``prefix``, or all.

        Keys may be set and deleted meanwhile; a key that is there all the time appears once.

        Raises:
            InvalidRequestError: ``prefix`` is not a str.
            CacheError: The file cannot be read.
        """
        begin = _MARK + _encoded("prefix", "" if prefix is None else prefix)
        return (key for part in self._blobs.keys(prefix=begin) for key in _texts(part))

    async def ayield_keys(self, *, prefix: str | None = None) -> AsyncIterator[str]:
        """As :meth:`yield_keys`."""
        begin = _MARK + _encoded("prefix", "" if prefix is None else prefix)
        parts = self._blobs.keys(prefix=begin)
        while part := await run_in_executor(None, next, parts, None):
            for key in _texts(part):
                yield key

    def close(self) -> None:
        """Close the file. Later calls raise, except ``close``."""
        self._blobs.close()

    def _check_value(self, key: str, value: object, key_bytes: int) -> None:
        if not isinstance(value, bytes):
            raise InvalidRequestError(
                f"the value of {key!r} is a {type(value).__name__}, and a byte store holds bytes; encode it first, for "
                "example by langchain_classic.storage.EncoderBackedStore or create_kv_docstore"
            )
        if len(value) + key_bytes > _MAX_ROW_BYTES:
            raise InvalidRequestError(
                f"the value of {key!r} has {len(value)} bytes, and sqlite stores at most {_MAX_ROW_BYTES} with the "
                "key; split it, or store it in a file"
            )
        if not self._blobs.holds(len(value)):
            raise InvalidRequestError(
                f"the value of {key!r} has {len(value)} bytes, and a store of max_bytes={self.max_bytes} cannot hold "
                f"it; give it twice the value and {1 << 15} bytes, or None"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), max_bytes=self.max_bytes), (str(self.path),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, max_bytes={self.max_bytes})"


def _stored_keys(keys: Iterable[str]) -> list[bytes]:
    if isinstance(keys, str):
        raise TypeError(f"keys must be a list of keys, not a str; for one key pass [{keys[:40]!r}]")
    return [_stored_key(key) for key in keys]


def _stored_key(key: str) -> bytes:
    stored = _MARK + _encoded("a key", key)
    return stored + _END if len(stored) == KEY_BYTES else stored


def _encoded(name: str, text: object) -> bytes:
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name} is {text!r}, a {type(text).__name__}; pass a str")
    return text.encode("utf-8", "surrogatepass")


def _texts(stored: Iterable[bytes]) -> Iterator[str]:
    """The keys as texts, without those of vectors."""
    for key in stored:
        if len(key) != KEY_BYTES:
            yield key[len(_MARK) :].removesuffix(_END).decode("utf-8", "surrogatepass")
