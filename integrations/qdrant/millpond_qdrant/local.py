"""qdrant-client's local mode, which keeps a database inside this process: for one thread at a time."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from qdrant_client import QdrantClient
from qdrant_client.local.qdrant_local import QdrantLocal

_locks: WeakKeyDictionary[QdrantClient, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


def silence() -> None:
    """Ignore the client's warnings of options without effect, which a sink says itself, once."""
    warnings.filterwarnings("ignore", message="Local mode performs exact")


def is_local(client: QdrantClient) -> bool:
    """Whether a client keeps its database inside this process."""
    return isinstance(getattr(client, "_client", None), QdrantLocal)


def is_folder(client: QdrantClient) -> bool:
    """Whether it keeps it in a folder."""
    return is_local(client) and bool(getattr(client._client, "persistent", False))


def serialized(client: QdrantClient) -> AbstractContextManager[object]:
    """Held during a request to a client: one thread at a time for local mode, which is not thread-safe.

    A server's client has no lock. Sinks that share a client share its lock.
    """
    if not is_local(client):
        return nullcontext()
    with _making:
        return _locks.setdefault(client, threading.RLock())


def lacked(client: QdrantClient, collection: str, names: Sequence[str]) -> frozenset[str] | None:
    """Of these vectors, those that some points of a collection in local mode may lack; ``None`` of a server's.

    Local mode evaluates a filter point by point in Python, and holds marks of absent vectors, which cost nothing to
    read.
    """
    if not is_local(client):
        return None
    stored = _collection(client, collection)
    absent = getattr(stored, "deleted_per_vector", None)  # of each name, for each point, whether it has no vector
    deleted = getattr(stored, "deleted", None)
    if absent is None or deleted is None:
        return frozenset(names)
    return frozenset(name for name in names if name in absent and bool(np.any(absent[name] & ~deleted)))


def local_storage(client: QdrantClient, collection: str) -> Any:
    """The SQLite connection of a collection in a folder; ``None`` of any other."""
    return getattr(getattr(_collection(client, collection), "storage", None), "storage", None)


def _collection(client: QdrantClient, name: str) -> Any:
    """The object that holds a collection in local mode, by its name or an alias."""
    local = getattr(client, "_client", None)
    collections = getattr(local, "collections", {})
    return collections.get(getattr(local, "aliases", {}).get(name, name))
