"""VectorCache: vectors come back bit for bit, and different texts and namespaces have different keys."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cached import WIDTH, kept, names, store

from millpond import VectorCache
from millpond.cache.blob_store import KEYS_PER_SELECT
from millpond.cache.vector_cache import CacheStats
from millpond.errors import CacheError, InvalidRequestError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


# Keys


@given(st.text(), st.text(), st.text(), st.text())
def test_different_pairs_have_different_keys(a: str, b: str, c: str, d: str) -> None:
    assert (VectorCache.key(a, b) == VectorCache.key(c, d)) == ((a, b) == (c, d))


@given(st.text(min_size=1), st.text())
def test_moving_the_border_changes_the_key(a: str, b: str) -> None:
    assert VectorCache.key(a, b) != VectorCache.key(a[:-1], a[-1] + b)


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


def test_lone_surrogates_have_keys() -> None:
    assert VectorCache.key("a", "\ud800") != VectorCache.key("a", "\ud801")


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


@pytest.mark.parametrize("count", [0, 1, 2, 3, KEYS_PER_SELECT - 1, KEYS_PER_SELECT, KEYS_PER_SELECT + 1, 500])
def test_hits_and_misses_keep_the_order_of_the_keys(path: Path, count: int) -> None:
    with VectorCache(path) as cache:
        present = [number for number in range(count) if number % 3]
        if present:
            store(cache, *present)
        assert kept(cache, *range(count)) == present
        assert cache.get(names(*range(count)), width=WIDTH).rows.shape == (count, WIDTH)


def test_repeated_keys_in_get(path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, 1, 2)
        assert kept(cache, 2, 9, 2, 1, 9, 1, 2) == [2, 2, 1, 1, 2]
        assert (cache.stats().hits, cache.stats().misses) == (5, 2)


def test_repeated_keys_in_put_the_last_counts(path: Path) -> None:
    key = names(1)[0]
    with VectorCache(path) as cache:
        cache.put([key, key], [[1.0], [2.0]], tokens=[1, 2], truncated=[False, True])
        hits = cache.get([key], width=1)
        assert (hits.rows[0, 0], hits.tokens[0], hits.truncated[0], len(cache)) == (2.0, 2, True, 1)


@pytest.mark.parametrize("width", [1, 2, 5000])
def test_put_again_replaces(path: Path, width: int) -> None:
    key = names(1)[0]
    with VectorCache(path) as cache:
        store(cache, 1, 2)
        cache.put([key], np.full((1, width), 9.0), tokens=[5], truncated=[False])
        np.testing.assert_array_equal(cache.get([key], width=width).rows, np.full((1, width), 9.0))
        assert kept(cache, 2) == [2]
        assert len(cache) == 2


def test_put_takes_float64_lists_and_strided_rows(path: Path) -> None:
    rows = np.arange(40, dtype=np.float64).reshape(4, 10)[:, ::2]
    with VectorCache(path) as cache:
        cache.put(names(*range(4)), rows, tokens=(1, 2, 3, 4), truncated=[0, 1, 0, 1])
        hits = cache.get(names(*range(4)), width=5)
        np.testing.assert_array_equal(hits.rows, rows.astype(np.float32))
        assert list(hits.truncated) == [False, True, False, True]


def test_empty_put_and_get(path: Path) -> None:
    with VectorCache(path) as cache:
        cache.put([], np.empty((0, 4)), tokens=[], truncated=[])
        assert cache.get([], width=4).rows.shape == (0, 4)
        assert len(cache) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused(path: Path, bad: float) -> None:
    rows = np.ones((3, 4))
    rows[1, 2] = bad
    with VectorCache(path) as cache:
        with pytest.raises(InvalidRequestError, match=r"rows\[1\]"):
            cache.put(names(0, 1, 2), rows, tokens=[1] * 3, truncated=[False] * 3)
        assert len(cache) == 0


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
    ],
)
def test_arguments_that_disagree_are_refused(
    path: Path, keys: Any, rows: Any, tokens: Any, truncated: Any, says: str
) -> None:
    with VectorCache(path) as cache, pytest.raises(ValueError, match=says):
        cache.put(keys, rows, tokens=tokens, truncated=truncated)


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
        assert stats == CacheStats(rows=3, bytes=stats.bytes, hits=2, misses=1, written=3, evicted=0)
        assert stats.bytes % 4096 == 0
        assert 4096 < stats.bytes < 100_000
        with pytest.raises(FrozenInstanceError):
            stats.rows = 4  # type: ignore[misc]
    with VectorCache(path) as cache:
        assert cache.stats() == CacheStats(rows=3, bytes=stats.bytes, hits=0, misses=0, written=0, evicted=0)


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
