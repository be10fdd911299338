"""qdrant-client's local mode, which keeps a database inside this process: for one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import numpy as np
from qdrant_client import QdrantClient
from qdrant_client.local.qdrant_local import QdrantLocal

_locks: WeakKeyDictionary[QdrantClient, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


def serialized(client: QdrantClient) -> AbstractContextManager[object]:
    """Held during a request to a client: one thread at a time for local mode, which is not thread-safe.

    A server's client has no lock. Sinks that share a client share its lock.
    """
    if not isinstance(getattr(client, "_client", None), QdrantLocal):
        return nullcontext()
    with _making:
        return _locks.setdefault(client, threading.RLock())


def lacked(client: QdrantClient, collection: str, names: Sequence[str]) -> frozenset[str]:
    """Of these vectors, those that some points of the collection may lack: of a server, all.

    A server is not asked first: its approximate count forgets points after deletes, and its exact one costs as much as
    the search for them, some 12 ns per point. Local mode evaluates a filter point by point in Python, and holds marks
    of absent vectors, which cost nothing to read.
    """
    local = getattr(client, "_client", None)
    if isinstance(local, QdrantLocal):
        stored = local.collections.get(local.aliases.get(collection, collection))
        absent = getattr(stored, "deleted_per_vector", None)  # of each name, for each point, whether it has no vector
        deleted = getattr(stored, "deleted", None)
        if absent is not None and deleted is not None:
            return frozenset(name for name in names if name in absent and bool(np.any(absent[name] & ~deleted)))
    return frozenset(names)
