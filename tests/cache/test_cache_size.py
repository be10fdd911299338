"""A cache with a size limit: it is kept, and the least recently used vectors are evicted."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.cached import kept, names, store

from millpond import VectorCache
from millpond.cache import blob_store
from millpond.errors import InvalidRequestError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


def test_the_limit_holds_and_the_newest_stay(path: Path) -> None:
    limit = 400_000
    with VectorCache(path, max_bytes=limit) as cache:
        for start in range(0, 2000, 50):
            store(cache, *range(start, start + 50), width=384)
            assert cache.stats().bytes <= limit
        present = kept(cache, *range(2000), width=384)
        assert len(cache) == len(present) == 2000 - cache.stats().evicted
        assert present == list(range(present[0], 2000))  # the oldest were evicted
        assert cache.stats().bytes > limit * 0.75
    assert path.stat().st_size < limit * 1.25


def test_used_vectors_outlive_unused_ones(path: Path) -> None:
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, *range(100), width=384)
        for start in range(1000, 2000, 20):
            assert kept(cache, *range(0, 100, 10), width=384) == list(range(0, 100, 10))
            store(cache, *range(start, start + 20), width=384)
        assert kept(cache, *range(100), width=384) == list(range(0, 100, 10))


def test_storing_again_is_a_use(path: Path) -> None:
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, *range(100), width=384)
        for start in range(1000, 2000, 20):
            store(cache, *range(start, start + 20), 7, width=384)
            group = [*range(start, start + 20), 7]
            assert kept(cache, *group, width=384) == group
        assert kept(cache, *range(100), width=384) == [7]


def brimful(cache: VectorCache) -> list[int]:
    """Fill a cache from 0 until it evicts a vector; returns the numbers that it holds, oldest first."""
    start = 0
    while cache.stats().evicted == 0:
        store(cache, *range(start, start + 10), width=384)
        start += 10
    return list(range(cache.stats().evicted, start))  # not by get, which would be a use


def test_a_put_does_not_evict_its_own_vectors(path: Path) -> None:
    with VectorCache(path, max_bytes=400_000) as cache:
        oldest = brimful(cache)[:10]
        group = [*range(1000, 1010), *oldest, *range(1010, 1020)]
        store(cache, *group, width=384)
        assert kept(cache, *group, width=384) == group


def test_uses_are_remembered_across_openings(path: Path) -> None:
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, *range(60), width=384)
        store(cache, *range(100, 160), width=384)
    with VectorCache(path, max_bytes=400_000) as cache:
        kept(cache, *range(60), width=384)  # written by close
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, *range(200, 260), width=384)
        present = kept(cache, *range(160), width=384)
        assert present[:60] == list(range(60))
        assert len(present) < 120


def test_readers_do_not_wait_to_write_uses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "_MAX_PENDING_USES", 1)
    with VectorCache(path, max_bytes=400_000) as cache:
        store(cache, 1)
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        reader = threading.Thread(target=kept, args=(cache, 1))
        reader.start()
        reader.join(15)  # less than the wait for a lock
        assert not reader.is_alive()
        writer.execute("ROLLBACK")
        writer.close()
        assert kept(cache, 1) == [1]


def test_one_put_larger_than_the_limit_keeps_its_last(path: Path) -> None:
    limit = 100_000
    with VectorCache(path, max_bytes=limit) as cache:
        store(cache, *range(1000), width=384)
        present = kept(cache, *range(1000), width=384)
        assert present == list(range(present[0], 1000))
        assert len(present) > 10
        stats = cache.stats()
        assert stats.bytes <= limit
        assert (stats.written, stats.evicted) == (1000, 1000 - len(present))
    assert path.stat().st_size < 2 * limit


def test_a_vector_larger_than_the_limit_is_not_kept(path: Path) -> None:
    with VectorCache(path, max_bytes=1 << 15) as cache:
        store(cache, 1)
        key = names(1)
        cache.put(key, np.ones((1, 20_000)), tokens=[1], truncated=[False])
        assert not cache.get(key, width=20_000).found.any()  # nor its old vector, which is now wrong


def test_a_smaller_limit_is_reached_by_the_next_put(path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, *range(300), width=384)
        assert cache.stats().bytes > 400_000
    with VectorCache(path, max_bytes=200_000) as cache:
        store(cache, 1000, width=384)
        assert cache.stats().bytes <= 200_000
        assert kept(cache, 1000, width=384) == [1000]
        assert kept(cache, *range(300), width=384)


@pytest.mark.parametrize("limit", [-1, 0, 1000])
def test_a_limit_too_small_is_refused(path: Path, limit: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"max_bytes={limit}.*32768"):
        VectorCache(path, max_bytes=limit)
    assert not path.exists()
