"""VectorCache: vectors come back bit for bit, under keys of their own, within a limit."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cached import WIDTH, kept, names, store

from millpond import VectorCache
from millpond.errors import CacheError, InvalidRequestError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


# Keys


@given(st.text(), st.text(), st.text(), st.text())
def test_different_pairs_have_different_keys(a: str, b: str, c: str, d: str) -> None:
    assert (VectorCache.key(a, b) == VectorCache.key(c, d)) == ((a, b) == (c, d))


@given(st.text(), st.lists(st.text()))
def test_keys_are_key_of_each(namespace: str, texts: list[str]) -> None:
    keys = VectorCache.keys(namespace, texts)
    assert keys == [VectorCache.key(namespace, text) for text in texts]
    assert all(type(key) is bytes and len(key) == 32 for key in keys)


def test_key_is_stable_across_versions() -> None:
    """A golden value: if it changes, every existing cache misses all its keys."""
    assert (
        VectorCache.key("namespace", "täxt").hex() == "63f125760a9633d75431957293631a149c2eaab584520ba7a4c78f3d7a211ac2"
    )
    assert VectorCache.key("a", "\ud800") != VectorCache.key("a", "\ud801")
    assert VectorCache.key("ab", "c") != VectorCache.key("a", "bc")


# Vectors


def test_rows_come_back_bit_for_bit(path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((700, 384), dtype=np.float32)
    rows[0, :3] = [-0.0, 1e-45, np.finfo(np.float32).max]
    keys = names(*range(700))
    with VectorCache(path) as cache:
        cache.put(keys, rows, tokens=np.arange(700), truncated=np.arange(700) % 2 == 0)
    with VectorCache(path) as cache:
        order = generator.permutation(700)
        hits = cache.get([keys[index] for index in order], width=384)
    assert hits.found.all()
    assert hits.rows.dtype == np.float32
    assert hits.rows.tobytes() == rows[order].tobytes()
    assert hits.tokens.dtype == np.int32
    np.testing.assert_array_equal(hits.tokens, order)
    np.testing.assert_array_equal(hits.truncated, order % 2 == 0)


@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 500])
def test_hits_and_misses_keep_the_order_of_the_keys(path: Path, count: int) -> None:
    with VectorCache(path) as cache:
        present = [number for number in range(count) if number % 3]
        if present:
            store(cache, *present)
        assert kept(cache, *range(count)) == present
        assert cache.get(names(*range(count)), width=WIDTH).rows.shape == (count, WIDTH)


def test_repeated_keys(path: Path) -> None:
    """Each is looked up; of a put the last counts."""
    key = names(7)[0]
    with VectorCache(path) as cache:
        store(cache, 1, 2)
        assert kept(cache, 2, 9, 2, 1, 9, 1, 2) == [2, 2, 1, 1, 2]
        assert (cache.stats().hits, cache.stats().misses) == (5, 2)
        cache.put([key, key], [[1.0], [2.0]], tokens=[1, 2], truncated=[False, True])
        hits = cache.get([key], width=1)
        assert (hits.rows[0, 0], hits.tokens[0], hits.truncated[0], len(cache)) == (2.0, 2, True, 3)


@pytest.mark.parametrize("width", [1, 2, 5000])
def test_put_again_replaces(path: Path, width: int) -> None:
    key = names(1)[0]
    with VectorCache(path) as cache:
        store(cache, 1, 2)
        cache.put([key], np.full((1, width), 9.0), tokens=[5], truncated=[False])
        np.testing.assert_array_equal(cache.get([key], width=width).rows, np.full((1, width), 9.0))
        assert kept(cache, 2) == [2]
        assert len(cache) == 2


def test_put_takes_float64_lists_and_strided_rows_and_none(path: Path) -> None:
    rows = np.arange(40, dtype=np.float64).reshape(4, 10)[:, ::2]
    with VectorCache(path) as cache:
        cache.put(names(*range(4)), rows, tokens=(1, 2, 3, 4), truncated=[0, 1, 0, 1])
        hits = cache.get(names(*range(4)), width=5)
        np.testing.assert_array_equal(hits.rows, rows.astype(np.float32))
        assert list(hits.truncated) == [False, True, False, True]
        cache.put([], np.empty((0, 4)), tokens=[], truncated=[])
        assert cache.get([], width=4).rows.shape == (0, 4) and len(cache) == 4


@pytest.mark.parametrize(
    ("keys", "rows", "tokens", "truncated", "says"),
    [
        (names(1), np.ones((2, 4)), [1, 1], [False] * 2, "1 keys"),
        (names(1, 2), np.ones((2, 4)), [1], [False], "tokens"),
        (names(1), np.ones(4), [1], [False], "shape|fit together"),
        ([b"short"], np.ones((1, 4)), [1], [False], r"keys\[0\]"),
        (["x" * 32], np.ones((1, 4)), [1], [False], r"keys\[0\]"),
        (names(1), np.ones((1, 4)), [-1], [False], "tokens=-1"),
        (names(1), np.ones((1, 4)), [2**31], [False], "tokens="),
        (names(1, 2), np.array([[1.0], [np.nan]]), [1, 1], [False] * 2, r"rows\[1\]"),
        (names(1), [[-np.inf]], [1], [False], r"rows\[0\]"),
    ],
)
def test_arguments_that_disagree_are_refused(
    path: Path, keys: Any, rows: Any, tokens: Any, truncated: Any, says: str
) -> None:
    with VectorCache(path) as cache:
        with pytest.raises(InvalidRequestError, match=says):
            cache.put(keys, rows, tokens=tokens, truncated=truncated)
        assert len(cache) == 0


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1, 2 * WIDTH])
def test_another_width_is_an_error(path: Path, width: int) -> None:
    with VectorCache(path) as cache:
        store(cache, 1, 2)
        with pytest.raises(CacheError, match=f"{WIDTH * 4} bytes.*width={width}"):
            cache.get(names(1, 2), width=width)
        assert kept(cache, 1, 2) == [1, 2]


# The object


def test_stats(path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, 1, 2, 3)
        kept(cache, 1, 2, 9)
        stats = cache.stats()
        assert (stats.rows, stats.hits, stats.misses, stats.written, stats.evicted) == (3, 2, 1, 3, 0)
        assert stats.bytes % 4096 == 0 and 4096 < stats.bytes < 100_000
    with VectorCache(path) as cache:
        again = cache.stats()
        assert (again.rows, again.bytes, again.hits, again.misses, again.written) == (3, stats.bytes, 0, 0, 0)


def test_closed_is_an_error_and_closing_twice_is_not(path: Path) -> None:
    cache = VectorCache(path)
    store(cache, 1)
    cache.close()
    cache.close()
    for call in (lambda: kept(cache, 1), lambda: store(cache, 2), cache.stats, cache.clear, cache.__len__):
        with pytest.raises(CacheError, match="closed"):
            call()
    assert str(path) in repr(cache)


def test_a_home_folder_of_an_unknown_user_is_a_cache_error():
    with pytest.raises(CacheError, match="is not a path here"):
        VectorCache("~nobody-of-that-name/cache.db")


# --- Limits -----------------------------------------------------------------------------------------------------------


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
            store(cache, *range(start, start + 20), 7, width=384)  # storing again is a use
        assert kept(cache, *range(100), width=384) == sorted([7, *range(0, 100, 10)])


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
    monkeypatch.setattr("millpond.cache.blob_store._MAX_PENDING_USES", 1)
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
