"""Rows in memory: before the file of a cache, and as a cache of their own."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.cached import WIDTH, kept, names, store, vector

from millpond import Engine, VectorCache
from millpond.cache import blob_store
from millpond.cache.recent_rows import RecentRows
from millpond.errors import CacheError, InvalidRequestError


def row(number: int, size: int = 100) -> tuple[bytes, int, int, int, bytes]:
    return names(number)[0], number, 0, 0, bytes([number % 256]) * size


def test_the_least_recently_used_rows_give_way() -> None:
    rows = RecentRows(4 * 500)
    assert rows.keep([row(1), row(2), row(3), row(4)]) == 0
    assert rows.find(names(1)) == [row(1)]
    assert rows.keep([row(5)]) == 1
    assert rows.find(names(1, 2, 3, 4, 5)) == [row(1), row(3), row(4), row(5)]
    assert rows.keep([row(6, size=1500)]) == 4  # as large as three others
    assert (rows.find(names(5)), rows.find(names(6)), rows.size()) == ([], [row(6, size=1500)], (1, 1900))
    assert rows.keep([row(7, size=2000)]) == 2  # which fits nowhere
    assert rows.size() == (0, 0)


def test_a_row_that_was_read_before_others_were_removed_is_not_kept() -> None:
    rows = RecentRows(10_000)
    before = rows.changes
    rows.drop(names(1))  # another thread stores the key
    rows.keep([row(1)], changes=before)
    assert rows.find(names(1)) == []
    rows.keep([row(1)], changes=rows.changes)
    assert rows.find(names(1)) == [row(1)]


def test_threads_find_whole_rows_within_the_limit() -> None:
    rows, failures = RecentRows(20 * 500), []

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for number in generator.integers(0, 50, 3000).tolist():
            found = rows.find(names(number))
            if found not in ([], [row(number)]):
                failures.append(found)
            rows.keep([row(number)])
            if number == 7:
                rows.drop(names(number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    count, size = rows.size()
    assert not failures and count == 20 and size == 20 * 500
    assert len(rows.find(names(*range(50)))) == 20


def forget(path: Path) -> None:
    """Remove every row from the file, as another process may."""
    connection = sqlite3.connect(path)
    connection.executescript("DELETE FROM rows; DELETE FROM uses")
    connection.close()


def test_few_keys_are_answered_from_memory_and_many_from_the_file(tmp_path: Path) -> None:
    with VectorCache(tmp_path / "cache.db") as cache:
        store(cache, *range(40))
        assert kept(cache, 1, 2, 3) == [1, 2, 3]
        assert kept(cache, *range(20, 40)) == list(range(20, 40))
        assert 3 * WIDTH * 4 < cache.stats().memory < 3 * WIDTH * 4 + 1500
        forget(cache.path)
        assert kept(cache, 3, 9, 1, 1) == [3, 1, 1]  # the ninth was never asked for
        assert kept(cache, 21) == []
        assert kept(cache, *range(17)) == []  # so many are not looked for in memory
        assert (cache.stats().hits, cache.stats().misses) == (26, 19)


def test_what_a_cache_returns_is_the_callers_own(tmp_path: Path) -> None:
    with VectorCache(tmp_path / "cache.db") as cache:
        store(cache, 1)
        for _ in range(2):
            hits = cache.get(names(1), width=WIDTH)
            assert (hits.rows[0] == vector(1)).all()
            hits.rows[:] = 9


def test_a_vector_that_is_stored_again_or_removed_is_not_found_in_memory(tmp_path: Path) -> None:
    with VectorCache(tmp_path / "cache.db") as cache:
        store(cache, 1, 2)
        assert kept(cache, 1, 2) == [1, 2]
        cache.put(names(1), np.full((1, WIDTH), 9.0), tokens=[5], truncated=[False])
        assert (cache.get(names(1), width=WIDTH).rows == 9).all()
        cache.clear()
        assert kept(cache, 2) == [] and cache.stats().memory == 0
        store(cache, 2)
        assert kept(cache, 2) == [2]
    with pytest.raises(CacheError, match="is closed"):
        cache.get(names(2), width=WIDTH)


def test_a_vector_of_another_width_is_an_error_from_memory_too(tmp_path: Path) -> None:
    with VectorCache(tmp_path / "cache.db") as cache:
        store(cache, 1)
        assert kept(cache, 1) == [1]
        with pytest.raises(CacheError, match="holds 192 bytes for a key"):
            cache.get(names(1), width=WIDTH + 1)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "_RECENT_BYTES", 10_000)
    with VectorCache(tmp_path / "cache.db") as cache:
        store(cache, *range(100))
        for number in range(100):
            assert kept(cache, number) == [number]
        assert 9_000 < cache.stats().memory <= 10_000
        forget(cache.path)
        assert kept(cache, 99) == [99] and kept(cache, 0) == []


def test_an_answer_from_memory_is_a_use(tmp_path: Path) -> None:
    """Else the vectors that are asked for most would be the first that the file evicts."""
    with VectorCache(tmp_path / "cache.db", max_bytes=400_000) as cache:
        store(cache, *range(100), width=384)
        assert kept(cache, 5, width=384) == [5]
        for start in range(200, 1000, 50):
            assert kept(cache, 5, width=384) == [5]
            store(cache, *range(start, start + 50), width=384)
    with VectorCache(tmp_path / "cache.db", max_bytes=400_000) as cache:
        assert kept(cache, 5, width=384) == [5] and kept(cache, 6, width=384) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("path", ["cache.db", ":memory:"])
def test_after_a_fork_nothing_is_answered_from_memory(tmp_path: Path, path: str) -> None:
    with VectorCache(path if path == ":memory:" else tmp_path / path) as cache:
        store(cache, 1)
        assert kept(cache, 1) == [1]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                cache.get(names(1), width=WIDTH)
            except CacheError as error:
                status = 0 if "does not survive a fork" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert kept(cache, 1) == [1]


def test_a_cache_in_memory_keeps_vectors_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with VectorCache(":memory:") as cache, VectorCache(":memory:") as other:
        store(cache, *range(40))
        assert kept(cache, *range(50)) == list(range(40)) and kept(other, 1) == []
        stats = cache.stats()
        assert (stats.rows, stats.hits, stats.misses, stats.written, stats.evicted) == (40, 40, 10, 40, 0)
        assert 40 * WIDTH * 4 < stats.bytes < 40 * (WIDTH * 4 + 500)
        assert (cache.widths(), cache.free_bytes(), len(cache)) == ({WIDTH: 40}, 0, 40)
        assert (cache.check().rows, cache.check().intact) == (40, True)
        cache.clear()
        assert kept(cache, 1) == [] and len(cache) == 0
    assert list(tmp_path.iterdir()) == []
    for use in (lambda: kept(cache, 1), lambda: store(cache, 1), cache.stats, cache.clear):
        with pytest.raises(CacheError, match="in memory is closed"):
            use()


def test_a_cache_in_memory_has_a_limit() -> None:
    with VectorCache(":memory:", max_bytes=1 << 15) as cache:
        store(cache, *range(100))
        count = len(cache)
        assert 0 < cache.stats().bytes <= 1 << 15 and cache.stats().evicted == 100 - count > 0
        assert kept(cache, *range(100)) == list(range(100 - count, 100))
    with pytest.raises(InvalidRequestError, match="max_bytes=100 is less than a cache can keep to"):
        VectorCache(":memory:", max_bytes=100)


def test_an_engine_with_a_cache_in_memory_computes_a_question_once(checkpoint_of: Callable[..., Path]) -> None:
    model = checkpoint_of("bert")
    texts = ["a question", "another one", "a question"]
    with Engine(model, dtype="float32", device="cpu") as engine:
        expected = engine.embed(texts).embeddings
    with Engine(model, dtype="float32", device="cpu", cache=":memory:") as engine:
        assert not engine.embed(texts).cached.any()
        again = engine.embed(texts)
        assert again.cached.all() and engine.stats().batch_texts == 2
        np.testing.assert_allclose(again.embeddings, expected, atol=1e-6)
        other = engine.embed(texts, role="query")  # under the same key, if the model has no prompts
        assert (other.cached.all(), engine.stats().batch_texts) == (True, 2)
        (one,) = engine.embed(texts[:1]).embeddings
        one[:] = 0
        assert engine.embed(texts[:1]).embeddings.any()


def test_models_do_not_share_vectors_in_memory(checkpoint_of: Callable[..., Path]) -> None:
    with VectorCache(":memory:") as cache:
        for kind in ("bert", "roberta"):
            with Engine(checkpoint_of(kind), dtype="float32", device="cpu", cache=cache) as engine:
                assert not engine.embed(["a question"]).cached.any()
                assert engine.embed(["a question"]).cached.all()
        assert len(cache) == 2
