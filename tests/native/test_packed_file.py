"""Packed weights on disk: mapped by the next load, written anew where they are not the right ones, bounded."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.native.models import compiled
from tests.native.test_families import SHORT, native, states
from tests.tiny import write_checkpoint

from millpond.backends.native.packing import packed_file

pytestmark = [pytest.mark.contract, compiled]

SIZE = 64 << 10
KEY = "0123abcd"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packed weights are kept: an empty cache, and files of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MILLPOND_PACKED_GB", raising=False)
    monkeypatch.setattr(packed_file, "_LEAST", 1)
    return tmp_path / "cache" / "millpond" / "packed"


@pytest.fixture
def written() -> list[int]:
    """The bytes that were written, one number for each time."""
    return []


def mapped(written: list[int], *, value: int = 7, key: str = KEY, size: int = SIZE) -> np.ndarray | None:
    def write(address: int) -> None:
        written.append(value)
        ctypes.memset(address, value, size)

    return packed_file.mapped(key, size, write)


def test_what_one_process_packed_the_next_one_maps(folder, written):
    first, second = mapped(written), mapped(written, value=8)
    assert (first == 7).all() and (second == 7).all() and not first.flags.writeable
    assert written == [7]
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.packed"]


DAMAGES = {
    "one byte": lambda content: content[:-100] + b"\0" + content[-99:],
    "the first byte": lambda content: content[:4096] + b"\0" + content[4097:],
    "truncated": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "of another key": lambda content: content.replace(KEY.encode(), KEY[::-1].encode()),
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_written_anew(damage, folder, written):
    assert mapped(written) is not None
    path = folder / f"{KEY}.packed"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(DAMAGES[damage](content))
    assert (mapped(written) == 7).all()
    assert written == [7, 7]
    assert path.read_bytes() == content


def test_a_file_that_is_replaced_stays_with_those_who_mapped_it(folder, written):
    first = mapped(written)
    (folder / f"{KEY}.packed").unlink()
    assert (mapped(written, value=9) == 9).all() and (first == 7).all()


def test_another_process_that_does_not_end_is_waited_for_so_long_only(folder, monkeypatch, written):
    monkeypatch.setattr(packed_file, "_PATIENCE", 0.1)
    folder.mkdir(parents=True)
    with (folder / f"{KEY}.part").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert mapped(written) is None
    assert written == []
    assert mapped(written) is not None  # what a process left that was killed is written over


def test_what_another_one_is_packing_is_shared(folder, written):
    begun, may_end = threading.Event(), threading.Event()

    def write(address: int) -> None:
        begun.set()
        assert may_end.wait(60)
        ctypes.memset(address, 7, SIZE)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(packed_file.mapped, KEY, SIZE, write)
        assert begun.wait(60)
        second = threads.submit(mapped, written, value=8)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        may_end.set()
        assert (first.result(60) == 7).all() and (second.result(60) == 7).all()
    assert written == [] and [path.name for path in folder.iterdir()] == [f"{KEY}.packed"]


def test_a_failure_to_pack_is_raised_and_leaves_nothing(folder):
    def write(address: int) -> None:
        raise KeyError("a weight")

    with pytest.raises(KeyError, match="a weight"):
        packed_file.mapped(KEY, SIZE, write)
    assert list(folder.iterdir()) == []


def test_a_cache_that_cannot_be_written_to_changes_nothing(tmp_path, monkeypatch, written):
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "_LEAST", 1)
    assert mapped(written) is None and written == []


@pytest.mark.parametrize("limit", ["0", "0.00001"])
def test_what_exceeds_the_limit_is_not_written(limit, folder, monkeypatch, written):
    monkeypatch.setenv("MILLPOND_PACKED_GB", limit)
    assert mapped(written) is None and not folder.exists()


def test_a_limit_that_is_no_number_is_told(folder, monkeypatch, written, caplog):
    monkeypatch.setenv("MILLPOND_PACKED_GB", "ten")
    assert mapped(written) is not None
    assert "MILLPOND_PACKED_GB=ten is no number of gigabytes" in caplog.text


def test_those_used_longest_ago_are_removed(folder, monkeypatch, written):
    monkeypatch.setenv("MILLPOND_PACKED_GB", str(3.5 * (SIZE + 4096) / 1e9))
    for i in range(3):
        assert mapped(written, key=f"a{i}") is not None
    for i in range(3):
        os.utime(folder / f"a{i}.packed", (time.time() - 1000 + i,) * 2)
    assert mapped(written, key="a0") is not None  # which is a use
    assert mapped(written, key="a3") is not None
    assert {path.stem for path in folder.iterdir()} == {"a0", "a2", "a3"}


def test_those_unused_for_a_month_are_removed(folder, written):
    assert mapped(written, key="old") is not None
    (folder / "left.part").touch()
    (folder / "other.txt").touch()
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    assert mapped(written) is not None
    assert {path.name for path in folder.iterdir()} == {f"{KEY}.packed", "other.txt"}


def test_what_they_take_is_told(folder, monkeypatch, written):
    assert packed_file.usage() == f"0.00 of at most 10 GB in {folder}"
    mapped(written, size=16_000_000)
    assert packed_file.usage().startswith("0.02 of at most 10 GB")
    monkeypatch.setenv("MILLPOND_PACKED_GB", "0")
    assert packed_file.usage() == "not kept (MILLPOND_PACKED_GB=0)"


def test_a_disk_without_room_is_left_alone(folder, monkeypatch, written):
    usage = type("Usage", (), {"free": 2 * SIZE - 1})
    monkeypatch.setattr(packed_file.shutil, "disk_usage", lambda path: usage)
    assert mapped(written) is None and written == []


# --- Models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "qwen3", "jina", "deberta-v2", "albert"])
@pytest.mark.parametrize(("dtype", "int8"), [("float32", "none"), ("bfloat16", "none"), ("float32", "all")])
def test_a_model_of_mapped_weights_computes_the_same(family, dtype, int8, folder, monkeypatch, tmp_path):
    if family == "jina" and int8 != "none":
        pytest.skip("no adapters of weights in eight bits")
    model = write_checkpoint(tmp_path / family, family)
    monkeypatch.setenv("MILLPOND_PACKED_GB", "0")
    own = states(model, SHORT, dtype=dtype, int8=int8)
    monkeypatch.delenv("MILLPOND_PACKED_GB")
    assert not folder.exists()
    for _ in range(2):
        np.testing.assert_array_equal(states(model, SHORT, dtype=dtype, int8=int8), own)
        assert len(list(folder.iterdir())) == 1


def test_other_weights_and_settings_have_files_of_their_own(folder, tmp_path):
    first = write_checkpoint(tmp_path / "model", "qwen3")
    before = states(first, SHORT)
    again = write_checkpoint(tmp_path / "model", "qwen3", seed=1)
    assert np.abs(states(again, SHORT) - before).max() > 0.1
    native(again, int8="all")
    assert len(list(folder.iterdir())) == 3


_LOAD = """
import sys
from pathlib import Path
from tests.native.test_families import native
from millpond.backends.native.packing import packed_file
packed_file._LEAST = 1
native(Path(sys.argv[1]))
"""


def test_processes_that_load_at_once_share_one_file(folder, tmp_path):
    model = write_checkpoint(tmp_path / "model", "qwen3")
    loads = [subprocess.Popen([sys.executable, "-c", _LOAD, str(model)]) for _ in range(3)]
    assert [load.wait(timeout=600) for load in loads] == [0, 0, 0]
    assert [path.suffix for path in folder.iterdir()] == [".packed"]
