"""MillpondByteStore: any key and value, through crashes, damage and locks, within limits, and beside vectors."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import pickle
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gates import LoopGate

from langchain_millpond import MillpondByteStore, MillpondEmbeddings, byte_store
from millpond.cache import blob_store, sqlitefile
from millpond.cache.repair import describe_cache, repair_cache
from millpond.cache.vector_cache import KEY_BYTES, VectorCache
from millpond.errors import CacheError, InvalidRequestError

PAGE = 4096
KEYS = [
    "",
    "a",
    "ab",
    "a/b",
    "ä",
    "a\u0308",
    "水車",
    "😀",
    "\ud83d",  # half of a surrogate pair, which is no character
    "\ud83d\ude00",
    "\0",
    "\n\t ",
    "%_*?",
    "'; DROP TABLE rows; --",
    "\uffff",
    "\U0010ffff",
    "long " * 5000,
    *("k" * length for length in range(20, 35)),  # one of them has as many bytes as a vector's key
]
VALUES = [b"", b"\0", b"\xff" * 100, bytes(range(256)), os.urandom(5000), '{"a": "ü"}'.encode(), bytes(3_000_000)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bytes.db"


@pytest.fixture
def store(path: Path) -> Iterator[MillpondByteStore]:
    with MillpondByteStore(path) as store:
        yield store


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A method of a store by name: itself, or its asynchronous form."""

    def sync(store: MillpondByteStore, name: str, *arguments: Any, **options: Any) -> Any:
        result = getattr(store, name)(*arguments, **options)
        return list(result) if name == "yield_keys" else result

    async def listed(store: MillpondByteStore, **options: Any) -> list[str]:
        return [key async for key in store.ayield_keys(**options)]

    def asynchronous(store: MillpondByteStore, name: str, *arguments: Any, **options: Any) -> Any:
        if name == "yield_keys":
            return asyncio.run(listed(store, **options))
        return asyncio.run(getattr(store, f"a{name}")(*arguments, **options))

    return sync if request.param == "sync" else asynchronous


def test_any_key_and_any_value_survive(path: Path, call: Callable[..., Any]) -> None:
    pairs = [(key, VALUES[number % len(VALUES)]) for number, key in enumerate(KEYS)]
    with MillpondByteStore(path) as store:
        call(store, "mset", pairs)
    with MillpondByteStore(path) as store:
        found = call(store, "mget", KEYS)
        assert found == [value for _, value in pairs]
        assert {type(value) for value in found} == {bytes}
        assert sorted(call(store, "yield_keys")) == sorted(KEYS)
        for prefix in (*KEYS, "zz", "k" * 19, "\ud83d\ude01"):
            expected = sorted(key for key in KEYS if key.startswith(prefix))
            assert sorted(call(store, "yield_keys", prefix=prefix)) == expected, prefix
        call(store, "mdelete", KEYS[::2])
        assert sorted(call(store, "yield_keys")) == sorted(KEYS[1::2])
        assert call(store, "mget", KEYS) == [None if i % 2 == 0 else pairs[i][1] for i in range(len(KEYS))]


def test_nothing_one_and_duplicates(store: MillpondByteStore, call: Callable[..., Any]) -> None:
    assert call(store, "mget", []) == []
    call(store, "mset", [])
    call(store, "mdelete", [])
    assert call(store, "yield_keys") == []
    call(store, "mset", [("a", b"1"), ("b", b"2"), ("a", b"3")])
    assert call(store, "mget", ["a", "b", "a", "c", "a"]) == [b"3", b"2", b"3", None, b"3"]
    call(store, "mdelete", ["a", "a", "absent"])
    assert call(store, "mget", ("a", "b")) == [None, b"2"]


def test_many_keys_are_listed_and_read(store: MillpondByteStore, call: Callable[..., Any]) -> None:
    pairs = [(f"{number % 3}/{number}", str(number).encode()) for number in range(5000)]
    call(store, "mset", pairs)
    assert call(store, "mget", [key for key, _ in pairs]) == [value for _, value in pairs]
    assert sorted(call(store, "yield_keys")) == sorted(key for key, _ in pairs)
    assert len(call(store, "yield_keys", prefix="1/")) == 1667
    call(store, "mdelete", call(store, "yield_keys", prefix="1/"))
    assert len(call(store, "yield_keys")) == 3333


@pytest.mark.parametrize(
    ("method", "arguments", "error", "message"),
    [
        ("mget", ("abc",), TypeError, r"pass \['abc'\]"),
        ("mdelete", ("abc",), TypeError, r"pass \['abc'\]"),
        ("mget", (["a", 7],), InvalidRequestError, "a key is 7, a int"),
        ("mget", ([b"a"],), InvalidRequestError, "a key is b'a', a bytes"),
        ("mdelete", ([None],), InvalidRequestError, "a key is None"),
        ("mset", ([("a", b"1"), ("b", "text")],), InvalidRequestError, "the value of 'b' is a str.*EncoderBackedStore"),
        ("mset", ([("a", b"1"), ("b", None)],), InvalidRequestError, "the value of 'b' is a NoneType"),
        ("mset", ([("a", b"1"), (b"b", b"2")],), InvalidRequestError, "a key is b'b'"),
    ],
    ids=["get str", "delete str", "int", "bytes", "none", "text value", "no value", "set bytes"],
)
def test_wrong_input_is_named_and_nothing_is_done(
    store: MillpondByteStore, call: Callable[..., Any], method: str, arguments: Any, error: Any, message: str
) -> None:
    store.mset([("abc", b"0"), ("c", b"1")])
    with pytest.raises(error, match=message):
        call(store, method, *arguments)
    assert list(store.yield_keys()) == ["abc", "c"]


def test_a_prefix_is_a_text(store: MillpondByteStore, call: Callable[..., Any]) -> None:
    with pytest.raises(InvalidRequestError, match="prefix is b'a', a bytes"):
        call(store, "yield_keys", prefix=b"a")


def test_a_value_too_large_for_sqlite_is_named(store: MillpondByteStore) -> None:
    with pytest.raises(InvalidRequestError, match="'big' has 1000000001 bytes, and sqlite stores at most"):
        store.mset([("small", b"1"), ("big", bytes(1_000_000_001))])
    assert store.mget(["small"]) == [None]


def test_the_limit_of_a_row_is_below_sqlites(store: MillpondByteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a limit that a test can reach: the largest row that is allowed is stored."""
    monkeypatch.setattr(byte_store, "_MAX_ROW_BYTES", 1_000_000 - 1024)
    with store._blobs._file.connection() as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)  # the pool gives the same connection again
    largest = byte_store._MAX_ROW_BYTES - len("bytes:key")
    store.mset([("key", bytes(largest))])
    assert store.mget(["key"]) == [bytes(largest)]
    with pytest.raises(InvalidRequestError, match="split it"):
        store.mset([("key", bytes(largest + 1))])
    with pytest.raises(CacheError):
        store._blobs.write({b"key": (0, bytes(1_000_001))})  # sqlite's own limit is where the constant says


# Files, threads and processes


def test_the_file_is_private_and_is_a_cache(path: Path) -> None:
    with MillpondByteStore(str(path)) as store:
        store.mset([("a", b"1")])
        assert store.path == path
        assert repr(store) == f"MillpondByteStore({str(path)!r}, max_bytes=None)"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert describe_cache(path).rows == 1


def test_a_closed_store_says_so(store: MillpondByteStore, call: Callable[..., Any]) -> None:
    store.mset([("a", b"1")])
    store.close()
    store.close()
    for method, arguments in (("mget", [["a"]]), ("mset", [[("a", b"2")]]), ("mdelete", [["a"]]), ("yield_keys", [])):
        with pytest.raises(CacheError, match="is closed; open it again"):
            call(store, method, *arguments)


def test_an_empty_store_is_true_like_any_other(store: MillpondByteStore) -> None:
    # CacheBackedEmbeddings takes a false store of queries for none.
    assert bool(store) is True


@pytest.mark.parametrize("journey", ["pickle", "copy", "deepcopy"])
def test_a_copy_opens_the_same_file(path: Path, journey: str) -> None:
    journeys = {"pickle": lambda s: pickle.loads(pickle.dumps(s)), "copy": copy.copy, "deepcopy": copy.deepcopy}
    with MillpondByteStore(path, max_bytes=1 << 20) as store:
        store.mset([("a", b"1")])
        with journeys[journey](store) as other:
            assert (other.path, other.max_bytes) == (path, 1 << 20)
            other.mset([("b", b"2")])
            assert other.mget(["a", "b"]) == [b"1", b"2"]
        assert store.mget(["b"]) == [b"2"]


def test_threads_share_a_store(store: MillpondByteStore) -> None:
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            chance = random.Random(thread)
            mine = [f"{thread}/{number}" for number in range(30)]
            for _ in range(8):
                store.mset([(key, key.encode() * chance.randrange(200)) for key in (*mine, "shared")])
                assert list(store.yield_keys(prefix=f"{thread}/")) == sorted(mine)
                store.mdelete(mine[:10])
                found = store.mget(mine)
                assert found[:10] == [None] * 10
                assert all(
                    value is not None and not value.replace(key.encode(), b"")
                    for key, value in zip(mine[10:], found[10:], strict=True)
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


_WRITE = """
import os, sys
from langchain_millpond import MillpondByteStore
path, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = MillpondByteStore(path)
for step in range(steps):
    store.mset([(f"{name}/{step}/{part}", f"{step} {part}".encode() * 50) for part in range(20)])
    print(step, flush=True)
if steps > 10_000:
    sys.exit("never reached")
"""


def _writer(path: Path, name: str, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WRITE, str(path), name, str(steps)], stdout=subprocess.PIPE, text=True
    )


def test_processes_share_a_file(path: Path) -> None:
    processes = [_writer(path, name, 20) for name in ("one", "two", "three")]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
    with MillpondByteStore(path) as store:
        assert len(list(store.yield_keys())) == 3 * 20 * 20
        assert store.mget(["two/7/3"]) == [b"7 3" * 50]


def test_a_killed_process_loses_nothing_that_was_set(path: Path) -> None:
    process = _writer(path, "killed", 1_000_000)
    assert process.stdout is not None
    for _ in range(30):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    last = max([last, *map(int, process.stdout.read().split())])
    process.stdout.close()
    with MillpondByteStore(path) as store:
        steps: dict[int, int] = {}
        for key in store.yield_keys(prefix="killed/"):
            step = int(key.split("/")[1])
            steps[step] = steps.get(step, 0) + 1
            (value,) = store.mget([key])
            assert value == f"{step} {key.split('/')[2]}".encode() * 50
        assert set(range(last + 1)) <= set(steps)
        assert set(steps.values()) == {20}  # a call is stored whole, or not at all
        assert max(steps) <= last + 1
    with VectorCache(path) as cache:
        assert cache.check().intact


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_opens_the_file_itself(path: Path) -> None:
    program = f"""
import os, sys
from langchain_millpond import MillpondByteStore
store = MillpondByteStore({str(path)!r})
store.mset([("a", b"1")])
child = os.fork()
if child == 0:
    try:
        store.mget(["a"])
    except Exception as error:
        with MillpondByteStore({str(path)!r}) as own:
            own.mset([("b", b"2")])
            os._exit(0 if "open it again in the new process" in str(error) and own.mget(["a"]) == [b"1"] else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.mget(["a", "b"]) == [b"1", b"2"]
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_folder_no_store(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="there is no folder .*absent.*create it first"):
        MillpondByteStore(tmp_path / "absent" / "bytes.db")
    with pytest.raises(CacheError, match="is not a file"):
        MillpondByteStore(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes into any folder")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CacheError, match="make it and its folder writable"):
            MillpondByteStore(tmp_path / "bytes.db")
    finally:
        tmp_path.chmod(0o700)


def test_a_file_that_cannot_be_written_keeps_what_it_has(store: MillpondByteStore, call: Callable[..., Any]) -> None:
    call(store, "mset", [("a", b"1")])
    with store._blobs._file.connection() as connection:
        connection.execute("PRAGMA query_only=ON")  # what a write to a disk mounted read-only answers
    for method, argument in (("mset", [("b", b"2")]), ("mdelete", ["a"])):
        with store._blobs._file.connection() as connection:
            connection.execute("PRAGMA query_only=ON")
        with pytest.raises(CacheError, match="cannot be written; make it and its folder writable"):
            call(store, method, argument)
    assert call(store, "mget", ["a", "b"]) == [b"1", None]
    call(store, "mset", [("b", b"2")])  # the failed connections are gone
    assert call(store, "mget", ["b"]) == [b"2"]


def test_a_locked_file_is_an_error_after_the_wait(
    store: MillpondByteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlitefile.SqliteFile, "busy_timeout", 0.05)
    store.mset([("a", b"1")])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CacheError, match="is locked by another process; wait for it or end it"):
        store.mset([("b", b"2")])
    assert store.mget(["a"]) == [b"1"]  # readers do not wait
    other.execute("ROLLBACK")
    other.close()
    store.mset([("b", b"2")])
    assert store.mget(["b"]) == [b"2"]


@pytest.mark.parametrize("content", [b"id,text\n1,none\n" * 500, b"x"], ids=["csv", "a byte"])
def test_a_foreign_file_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CacheError, match="is not a millpond cache"):
        MillpondByteStore(path)
    assert path.read_bytes() == content


# Damage


def _flip(path: Path, needle: bytes) -> None:
    """Change a byte of ``needle`` wherever the file has it: pages that were split keep old copies."""
    data = path.read_bytes()
    assert needle in data
    path.write_bytes(data.replace(needle, bytes([needle[0] ^ 0x40]) + needle[1:]))


def test_a_damaged_value_is_not_found_and_takes_no_other_down(
    path: Path, call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [(f"key {number}", f"<value {number}>".encode() * 20) for number in range(50)]
    with MillpondByteStore(path) as store:
        store.mset(pairs)
    _flip(path, b"<value 7>" * 20)
    with MillpondByteStore(path) as store:
        with caplog.at_level(logging.DEBUG, logger="langchain_millpond"):
            for _ in range(2):
                found = call(store, "mget", [key for key, _ in pairs])
                assert found == [None if key == "key 7" else value for key, value in pairs]
        assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
        assert "1 of 50 values could not be read whole" in caplog.messages[0]
        assert f"millpond cache repair {path}" in caplog.messages[0]
        assert call(store, "yield_keys", prefix="key 7") == ["key 7"]
        call(store, "mset", [("key 7", b"new")])
        assert call(store, "mget", ["key 7"]) == [b"new"]


def test_a_broken_page_costs_the_values_on_it_only(path: Path) -> None:
    pairs = [(f"key {number:03}", b"%03d" % number * 400) for number in range(100)]  # three to a page
    with MillpondByteStore(path) as store:
        store.mset(pairs)
    data = bytearray(path.read_bytes())
    at = data.index(b"050" * 400) // PAGE * PAGE
    data[at : at + PAGE] = bytes([0xA5]) * PAGE
    path.write_bytes(data)
    with MillpondByteStore(path) as store:
        found = store.mget([key for key, _ in pairs])
        lost = [key for (key, _), value in zip(pairs, found, strict=True) if value is None]
        assert "key 050" in lost
        assert 1 <= len(lost) <= 4
        assert all(value in (None, expected) for (_, expected), value in zip(pairs, found, strict=True))
    repaired = repair_cache(path)
    assert repaired.rows >= 96
    with MillpondByteStore(path) as store:
        again = store.mget([key for key, _ in pairs])
        assert again == found  # what could be read before is there after the repair


def test_a_file_that_cannot_be_listed_or_written_says_how_to_keep_the_rest(path: Path) -> None:
    """Every page but the first is broken in turn."""
    pairs = [(f"key {number:03}" * 9, b"%03d" % number * 100) for number in range(200)]
    with MillpondByteStore(path) as store:
        store.mset(pairs)
    whole = path.read_bytes()
    refused: dict[str, list[str]] = {"list": [], "set": [], "delete": []}
    for start in range(PAGE, len(whole), PAGE):
        path.write_bytes(whole[:start] + bytes([0xA5]) * PAGE + whole[start + PAGE :])
        with MillpondByteStore(path) as store:
            attempts: dict[str, Callable[[], Any]] = {
                "list": lambda store=store: list(store.yield_keys()),
                "set": lambda store=store: store.mset(pairs),
                "delete": lambda store=store: store.mdelete([key for key, _ in pairs]),
            }
            for name, attempt in attempts.items():
                try:
                    attempt()
                except CacheError as error:
                    refused[name].append(str(error))
    assert all(refused.values())
    for message in (message for messages in refused.values() for message in messages):
        assert "is damaged; delete it, or choose another path" in message
        assert message.endswith(f"To keep what can be read: millpond cache repair {path}")


def test_a_file_without_its_header_is_refused_and_can_be_repaired(path: Path) -> None:
    with MillpondByteStore(path) as store:
        store.mset([("a", b"1"), ("ü", b""), ("k" * 26, b"3")])
    data = bytearray(path.read_bytes())
    data[:100] = bytes(100)
    path.write_bytes(data)
    with pytest.raises(CacheError, match=f"millpond cache repair {path}"):
        MillpondByteStore(path)
    repair_cache(path)
    with MillpondByteStore(path) as store:
        assert list(store.yield_keys()) == ["a", "k" * 26, "ü"]
        assert store.mget(["a", "ü", "k" * 26]) == [b"1", b"", b"3"]


def test_a_deleted_file_is_created_again(
    store: MillpondByteStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.mset([("a", b"1")])
    path.unlink()
    assert store.mget(["a"]) == [None]
    store.mset([("a", b"2")])
    with MillpondByteStore(path) as other:
        assert other.mget(["a"]) == [b"2"]
    assert "was deleted or replaced" in caplog.text


# The limit


def test_the_least_recently_used_values_are_evicted(path: Path) -> None:
    with MillpondByteStore(path, max_bytes=200_000) as store:
        for start in range(0, 100, 10):
            store.mset([(f"old {number}", bytes(1000)) for number in range(start, start + 10)])
        used = [f"old {number}" for number in range(30)]
        assert None not in store.mget(used)
        new = [f"new {number}" for number in range(60)]
        for key in new:
            store.mset([(key, bytes(1000))])
        left = set(store.yield_keys())
        assert {*used, *new} <= left
        assert len(left) < 160
        assert store._blobs.bytes_in_use() <= 200_000


def test_a_limit_that_holds_nothing_is_refused(path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="max_bytes=1000 is less than a cache can keep to"):
        MillpondByteStore(path, max_bytes=1000)
    assert not path.exists()


def test_a_value_above_the_limit_is_refused_and_evicts_nothing(path: Path) -> None:
    with MillpondByteStore(path, max_bytes=200_000) as store:
        store.mset([("small", b"1")])
        with pytest.raises(InvalidRequestError, match="'large' has 150000 bytes.*max_bytes=200000.*or None"):
            store.mset([("other", b"2"), ("large", bytes(150_000))])
        assert list(store.yield_keys()) == ["small"]
        store.mset([("large", bytes(80_000))])
        assert store.mget(["large"]) == [bytes(80_000)]
    with MillpondByteStore(path, max_bytes=2 * 150_000 + (1 << 15)) as store:  # what the message says
        store.mset([("large", bytes(150_000))])
        assert store.mget(["large"]) == [bytes(150_000)]


# Beside the vectors of an engine


def test_vectors_and_bytes_of_one_file_do_not_see_each_other(minilm: str, path: Path) -> None:
    texts = [f"text {number}" for number in range(40)]
    with MillpondByteStore(path) as store:
        store.mset([("k" * length, b"value") for length in range(20, 40)])
        embeddings = MillpondEmbeddings(model=minilm, dtype="float32", cache=path)
        first = embeddings.embed_documents(texts)
        assert len(list(store.yield_keys())) == 20
        assert describe_cache(path).widths == {384: 40}
        assert describe_cache(path).rows == 60
        store.mdelete(list(store.yield_keys()))
        assert embeddings._engine().embed(texts, role="document").cached.all()
        np.testing.assert_allclose(embeddings.embed_documents(texts), first, atol=1e-6)
    embeddings._engine().close()


@pytest.mark.parametrize("first", [0, 1, 255])
def test_a_vectors_key_is_never_taken_for_a_text(store: MillpondByteStore, path: Path, first: int) -> None:
    """Also one that begins with the mark of the store: its length tells it."""
    keys = [b"bytes:" + bytes([first]) * (KEY_BYTES - 6), b"bytes:" + b"k" * (KEY_BYTES - 6)]
    with VectorCache(path) as cache:
        cache.put(keys, np.ones((2, 4)), tokens=[1, 1], truncated=[False, False])
        store.mset([("k" * (KEY_BYTES - 6), b"mine")])
        assert list(store.yield_keys()) == ["k" * (KEY_BYTES - 6)]
        assert store.mget(["k" * (KEY_BYTES - 6)]) == [b"mine"]
        store.mdelete(["k" * (KEY_BYTES - 6)])
        assert cache.get(keys, width=4).found.all()


# The event loop


async def test_the_loop_goes_on_while_the_file_is_read_and_written(
    store: MillpondByteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def listed() -> list[str]:
        return [key async for key in store.ayield_keys()]

    gate, identity_of = LoopGate(), sqlitefile._identity_of  # called for every access
    monkeypatch.setattr(sqlitefile, "_identity_of", gate.hold(identity_of))
    await gate.run(store.amset([("a", b"1"), ("b", b"2")]))
    assert await gate.run(store.amget(["a"])) == [b"1"]
    assert await gate.run(listed()) == ["a", "b"]
    await gate.run(store.amdelete(["a"]))
    assert len(gate.calls) >= 4
    assert not gate.blocked

    async def blocks() -> None:
        store.mset([("c", b"3")])

    gate = LoopGate(seconds=0.2)
    monkeypatch.setattr(sqlitefile, "_identity_of", gate.hold(identity_of))
    await gate.run(blocks())
    assert gate.blocked  # the gate detects a blocked loop


async def test_a_listing_takes_a_thread_for_many_keys_at_once(
    store: MillpondByteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.amset([(f"{number:04}", b"") for number in range(3000)])
    accesses = []
    identity_of = sqlitefile._identity_of

    def counted(path: Path) -> Any:
        accesses.append(threading.current_thread())
        return identity_of(path)

    monkeypatch.setattr(sqlitefile, "_identity_of", counted)
    assert len([key async for key in store.ayield_keys()]) == 3000
    assert len(accesses) <= 4
    assert threading.main_thread() not in accesses
    async for key in store.ayield_keys(prefix="00"):
        assert key == "0000"
        break  # a caller may stop
    assert store._blobs._file._in_use == 0


async def test_many_tasks_share_a_store(store: MillpondByteStore) -> None:
    async def work(task: int) -> None:
        keys = [f"{task}/{number}" for number in range(10)]
        await store.amset([(key, key.encode()) for key in keys])
        assert await store.amget(keys) == [key.encode() for key in keys]
        await store.amdelete(keys[:5])
        assert [key async for key in store.ayield_keys(prefix=f"{task}/")] == sorted(keys[5:])

    await asyncio.gather(*(work(task) for task in range(50)))
    assert len(list(store.yield_keys())) == 250
    assert blob_store._KEYS_PER_LISTING > 250
