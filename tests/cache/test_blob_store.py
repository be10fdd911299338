"""Deleting keys of a blob store and listing those with a prefix; and rows that are none of a cache's vectors."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from tests.cached import kept, store

from millpond.cache import blob_store
from millpond.cache.blob_store import SMALLEST_LIMIT, BlobStore
from millpond.cache.vector_cache import VectorCache
from millpond.errors import CacheError

KEYS = [
    b"",
    b"\x00",
    b"\x00a",
    b"a",
    b"a\x00",
    b"ab",
    b"a\xff",
    b"a\xffb",
    b"b",
    b"\xfe",
    b"\xff",
    b"\xff\x00",
    b"\xff\xff",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


def write(blobs: BlobStore, *keys: bytes, value: bytes = b"value") -> None:
    blobs.write(dict.fromkeys(keys, (0, value)))


def listed(blobs: BlobStore, prefix: bytes = b"") -> list[bytes]:
    return [key for part in blobs.keys(prefix=prefix) for key in part]


@pytest.mark.parametrize("part", [1, 2, 3, 1000])
def test_keys_are_listed_by_prefix(path: Path, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "_KEYS_PER_LISTING", part)
    blobs = BlobStore(path, max_bytes=None)
    write(blobs, *random.Random(0).sample(KEYS, len(KEYS)))
    for prefix in (*KEYS, b"c", b"a\xfe", b"\xff\xff\xff"):
        assert listed(blobs, prefix) == sorted(key for key in KEYS if key.startswith(prefix)), prefix
    blobs.close()
    with pytest.raises(CacheError, match="is closed"):
        listed(blobs)


def test_a_listing_goes_on_while_keys_come_and_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "_KEYS_PER_LISTING", 10)
    blobs = BlobStore(path, max_bytes=None)
    kept_keys = [b"%03d" % number for number in range(0, 100, 2)]
    write(blobs, *kept_keys)
    found = []
    for step, part in enumerate(blobs.keys(prefix=b"")):
        found += part
        write(blobs, *(b"%03d" % number for number in range(1, 100, 20)), b"new %d" % step)
        blobs.delete([b"%03d" % number for number in range(1, 100, 40)])
        assert blobs._file._in_use == 0  # a fork waits for connections in use
    assert [key for key in found if key in kept_keys] == kept_keys
    assert len(set(found)) == len(found)
    blobs.close()


def test_deleted_keys_are_gone_and_the_others_stay(path: Path) -> None:
    blobs = BlobStore(path, max_bytes=None)
    many = [b"key %d" % number for number in range(500)]
    write(blobs, *many)
    assert blobs.delete([*many[:300], b"absent"]) == 300
    assert blobs.delete(many[:300]) == blobs.delete([]) == 0
    assert sorted(blobs.read(many).keys) == sorted(many[300:])
    assert blobs.count() == 200
    write(blobs, *many[:5], value=b"again")
    assert blobs.read(many[:5]).values == (b"again",) * 5
    blobs.close()
    again = BlobStore(path, max_bytes=None)
    assert sorted(listed(again)) == sorted([*many[:5], *many[300:]])
    again.close()


def test_deleting_makes_room_under_a_limit(path: Path) -> None:
    blobs = BlobStore(path, max_bytes=400_000)
    many = [b"key %d" % number for number in range(150)]
    write(blobs, *many, value=bytes(1000))
    before = blobs.bytes_in_use()
    assert blobs.evicted == 0
    blobs.read(many)  # held in memory as used
    assert blobs.delete(many[:100]) == 100
    assert blobs.bytes_in_use() < before - 80_000
    write(blobs, *(b"other %d" % number for number in range(60)), value=bytes(1000))
    assert blobs.evicted == 0
    assert blobs.count() == 110
    blobs.close()


def test_a_value_that_fits_is_kept_and_a_larger_one_does_not_fit(path: Path) -> None:
    limit = SMALLEST_LIMIT * 4
    blobs = BlobStore(path, max_bytes=limit)
    largest = max(length for length in range(limit) if blobs.holds(length))
    write(blobs, b"key", value=bytes(largest))
    assert blobs.read([b"key"]).values == (bytes(largest),)
    write(blobs, b"key", value=bytes(largest + 1))
    assert blobs.read([b"key"]).values == ()
    blobs.close()
    unlimited = BlobStore(path, max_bytes=None)
    assert unlimited.holds(1 << 40)
    unlimited.close()


def test_threads_write_delete_and_list_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_store, "_KEYS_PER_LISTING", 7)
    blobs = BlobStore(path, max_bytes=None)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            mine = [b"%d/%d" % (thread, number) for number in range(20)]
            for _ in range(10):
                write(blobs, *mine)
                assert listed(blobs, b"%d/" % thread) == sorted(mine)
                assert blobs.delete(mine) == 20
                assert listed(blobs, b"%d/" % thread) == []
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert blobs.count() == 0
    blobs.close()


def test_a_caches_widths_are_those_of_its_vectors(path: Path) -> None:
    with VectorCache(path) as cache:
        store(cache, 1, 2, 3)
        blobs = BlobStore(path, max_bytes=None)
        write(blobs, b"a key of other length", value=b"odd bytes")
        blobs.close()
        assert cache.widths() == {48: 3}
        assert cache.check().intact
        assert kept(cache, 1, 2, 3) == [1, 2, 3]


def test_the_rows_around_a_broken_page_are_all_read(path: Path) -> None:
    """Every row that a lookup by its key finds is among all rows, the last one before the page too."""
    blobs = BlobStore(path, max_bytes=None)
    keys = [b"%03d" % number for number in range(60)]
    blobs.write({key: (0, key * 400) for key in keys})  # three to a page
    blobs.close()
    content = bytearray(path.read_bytes())
    start = content.index(b"030" * 400) // 4096 * 4096
    content[start : start + 4096] = bytes([0xA5]) * 4096
    path.write_bytes(content)
    damaged = BlobStore(path, max_bytes=None)
    single = [key for key in keys if damaged.read([key]).values]
    assert 56 <= len(single) < 60
    listed_rows = [row.key for part in damaged.rows() for row in part if row is not None and row.intact]
    assert sorted(listed_rows) == single
    damaged.close()
